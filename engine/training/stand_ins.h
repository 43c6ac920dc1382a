// SPDX-License-Identifier: Apache-2.0
// Refuses parameters of which no_sync() of a sharded model keeps gradients. Internal.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <weft/base/error.h>
#include <weft/engine/shard/sharded_model.h>

namespace weft::training {

// Throws Caller for such a parameter. `caller`: the function that would have scaled its .grad only.
inline void require_averaged(const at::Tensor& parameter, const char* caller) {
  if (!shard::ShardedModel::keeps_gradient_of(parameter)) return;
  throw Error(Blame::Caller, std::string(caller) +
                                 ": no_sync() keeps gradients of a sharded model that no backward "
                                 "has averaged yet; call it after a backward whose forward was "
                                 "outside of no_sync(), or drop them before (zero_grad)");
}

}  // namespace weft::training
