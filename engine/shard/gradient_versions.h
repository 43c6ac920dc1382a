// SPDX-License-Identifier: Apache-2.0
// Tells whether the program has written a shard's .grad since a backward last added to it, by
// libtorch's count of writes. Inside of weft::join that shows gradients which the program has
// zeroed by hand, also on a rank that has no rows of the parameter.
//
// JoinedSteps owns it. Thread-safe: backwards note what they have written, on their threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <weft/engine/shard/unit.h>

namespace weft::shard {

// True for a hook that only notes versions, which reads no values.
bool only_notes(const torch::autograd::FunctionPostHook& hook);

class GradientVersions {
 public:
  // Notes the gradients of all shards, now and whenever a backward has added to them.
  explicit GradientVersions(const std::vector<std::shared_ptr<Unit>>& units);
  ~GradientVersions();
  GradientVersions(const GradientVersions&) = delete;
  GradientVersions& operator=(const GradientVersions&) = delete;

  // Notes all gradients as they are: Weft has written them.
  void note_all();
  // True unless the gradient is as it was noted.
  bool is_written(const Unit& unit, std::size_t parameter, const at::Tensor& gradient) const;

  class Noted;  // shared with the hooks

 private:
  struct Hook;
  const std::shared_ptr<Noted> noted_;
  std::vector<Hook> hooks_;
};

}  // namespace weft::shard
