// SPDX-License-Identifier: Apache-2.0
// Options of FullyShardedDataParallel and fully_shard.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

namespace torch {
using Dtype = at::ScalarType;  // as <torch/types.h> has it
namespace nn {
class Module;
}
}  // namespace torch

namespace weft {

// Options of a sharded model, the same on all ranks.
struct FullyShardOptions {
  // Free a unit's whole parameters after its forward, and gather them again for its backward.
  // False: they stay until backward has used them.
  bool reshard_after_forward = true;
  // The dtype in which parameters are gathered and computed with, and the dtype in which gradients
  // are reduced; none: the parameters' own, and the gradients'. They concern floating-point
  // parameters. Shards and optimizer state keep the parameters' own dtype. With param_dtype, the
  // forward's arguments that are floating-point tensors are cast as well; tensors inside of other
  // arguments, such as a vector, keep their dtype.
  std::optional<torch::Dtype> param_dtype{}, reduce_dtype{};
  // Shards and their gradients live in pinned host memory. For models on a GPU: move the model
  // there before. model->parameters() are on the CPU then, and the optimizer steps there.
  // backward() returns when the gradients have come, and a forward without gradients when the
  // shards have been read; nothing else makes the host wait.
  bool offload = false;
  // How many units are gathered ahead of their use, in the order that the first step recorded.
  int prefetch = 1;
  // Returns true for the submodules that are units; `name` is the module's path, as in
  // named_modules(). None: the direct children that have parameters; of a Sequential or ModuleList,
  // its children in its place.
  std::function<bool(const std::string& name, const torch::nn::Module&)> units{};
};

}  // namespace weft
