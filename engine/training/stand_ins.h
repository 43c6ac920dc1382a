// SPDX-License-Identifier: Apache-2.0
// Refuses gradients that stand in for those which no_sync() of a sharded model keeps. Internal.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <weft/base/error.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::training {

// Throws Caller for such a gradient. `caller`: the function that would have scaled it.
inline void require_averaged(const at::Tensor& gradient, const char* caller) {
  if (!is_stand_in(gradient)) return;
  throw Error(Blame::Caller, std::string(caller) +
                                 ": no_sync() keeps gradients of a sharded model that no backward "
                                 "has averaged yet; call it after a backward whose forward was "
                                 "outside of no_sync(), or drop them before (zero_grad)");
}

}  // namespace weft::training
