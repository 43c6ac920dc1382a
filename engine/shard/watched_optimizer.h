// SPDX-License-Identifier: Apache-2.0
// An optimizer of a sharded model inside of weft::join. It has one more parameter meanwhile, the
// probe, with a gradient of its own: what happens to the probe shows on every rank, also on one
// that has no rows, whether step() and zero_grad() were called. libtorch has no hooks for that.
//
// JoinedSteps owns it. One thread at a time; has_stepped() may wait for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/unit.h>

namespace torch::optim {
class Optimizer;
}

namespace weft::shard {

class WatchedOptimizer {
 public:
  struct Parameter {
    std::shared_ptr<Unit> unit;
    std::size_t place;
  };
  // Throws Caller for an optimizer that cannot go on without inputs, or that has parameters which
  // are no shards of the model; `name` names it.
  WatchedOptimizer(torch::optim::Optimizer& optimizer, const std::string& name,
                   const ShardedModel& model);
  ~WatchedOptimizer();
  WatchedOptimizer(const WatchedOptimizer&) = delete;
  WatchedOptimizer& operator=(const WatchedOptimizer&) = delete;

  const std::vector<Parameter>& parameters() const { return parameters_; }
  // A text that must be the same on all ranks.
  std::string description() const;
  // Learning rates by parameter group; NaN for options without one.
  std::vector<double> rates() const;

  // True if it has stepped, or if its gradients were dropped or zeroed, since this was last asked.
  bool has_stepped();
  bool has_cleared();
  // Steps with these learning rates.
  void step(const std::vector<double>& rates);

 private:
  std::uint64_t version() const;
  void arm();

  torch::optim::Optimizer& optimizer_;
  std::vector<Parameter> parameters_;
  at::Tensor probe_;
  std::uint64_t seen_ = 0;   // version()
  std::uint64_t armed_ = 0;  // the version of the probe's gradient
};

}  // namespace weft::shard
