// SPDX-License-Identifier: Apache-2.0
// Shards of ZeroRedundancyOptimizer: parameters that one rank steps together, and whose values
// travel as one. Used by the thread that uses the optimizer, which owns them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace weft::parallel {

struct Shard {
  // The shard's memory if it is one piece: its buffer, or its only parameter. Undefined otherwise.
  at::Tensor whole_memory() const;
  // The shard's values in one piece: whole_memory(), or a copy (uninitialised on other ranks than
  // the owner).
  at::Tensor travelling() const;
  // Makes the values that the owner has sent the parameters' values.
  static void land(const at::Tensor& flat, const std::vector<at::Tensor>& parameters);

  std::size_t group = 0;  // index into param_groups()
  int owner = 0;
  std::vector<at::Tensor> parameters;
  at::Tensor flat;  // the parameters' memory, if they are views
  // Only on its owner. Shared with a running step, which may outlive this object.
  std::shared_ptr<torch::optim::Optimizer> optimizer;
};

}  // namespace weft::parallel
