// SPDX-License-Identifier: Apache-2.0
// AutocastGuard: operators of this thread compute in a smaller dtype while it lives. Semantics of
// torch.autocast. The forward and the loss belong inside; backward() is called outside, and
// computes in the dtypes that forward has chosen.
//
//   at::Tensor loss;
//   {
//     const weft::AutocastGuard autocast(torch::kCUDA, torch::kBFloat16);
//     loss = loss_of(ddp(inputs), labels);
//   }
//   loss.backward();
//
// A thread that the region starts computes as usual unless it makes a guard of its own. Nothing
// here blocks.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <weft/base/export.h>

namespace weft {

class [[nodiscard]] WEFT_API AutocastGuard {
 public:
  // Guards nest; each restores what was set before. With `on` false the region computes in the
  // inputs' own dtypes, also inside of another region. Throws Caller for a dtype other than
  // bfloat16 and float16, and Unsupported for a device type that libtorch has no autocast for.
  AutocastGuard(c10::DeviceType device, c10::ScalarType dtype, bool on = true);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const c10::DeviceType device_;
  const bool was_on_;
  const c10::ScalarType dtype_before_;
};

}  // namespace weft
