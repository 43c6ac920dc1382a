// SPDX-License-Identifier: Apache-2.0
// The optimizer of a sharded model as it would be without sharding, for checkpoints. Internal.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/unit.h>

namespace torch::optim {
class Optimizer;
}

namespace weft::shard {

// While it lives, the optimizer's parameters have their whole shapes, though no values, and its
// state is whole on every rank. Construction is collective and blocks. `writable`: at the end each
// rank keeps its rows of the state that the optimizer has then. Does nothing for parameters that
// are no shards.
class WholeOptimizer {
 public:
  WholeOptimizer(torch::optim::Optimizer& optimizer, bool writable);
  ~WholeOptimizer();
  WholeOptimizer(const WholeOptimizer&) = delete;
  WholeOptimizer& operator=(const WholeOptimizer&) = delete;

 private:
  struct Saved;
  void gather_state();
  void take_rows();

  torch::optim::Optimizer& optimizer_;
  const bool writable_;
  struct Replaced {
    std::size_t group = 0, index = 0;  // in the optimizer
    at::Tensor shard, whole;
    std::shared_ptr<Unit> unit;
    std::size_t place = 0;  // in the unit
  };
  std::vector<Replaced> replaced_;
  std::unique_ptr<Saved> saved_;  // the state of the shards
};

}  // namespace weft::shard
