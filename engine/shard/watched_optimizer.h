// SPDX-License-Identifier: Apache-2.0
// An optimizer of a sharded model inside of weft::join. It has one more parameter meanwhile, the
// probe, with a gradient of its own: what happens to the probe shows on every rank, also on one
// that has no rows, whether step() and zero_grad() were called. libtorch has no hooks for that. The
// first of the probe's two elements is 0 and its gradient is 1, so it shows what a gradient does;
// the second is 1 and its gradient is 0, so it shows what is done without one, such as decay.
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
  // True if its last step was made with the gradients that it had before they were zeroed, false if
  // with zeros. Valid once has_stepped() has returned true.
  bool has_seen_gradients() const { return has_seen_gradients_; }
  // Writes zeros into the gradients that are there.
  void zero_gradients() const;
  // Steps with these learning rates.
  void step(const std::vector<double>& rates);

 private:
  std::uint64_t version() const;
  bool saw_gradient() const;
  void arm();
  // Makes the next step the first one of the probe.
  void forget_step();

  torch::optim::Optimizer& optimizer_;
  std::vector<Parameter> parameters_;
  at::Tensor probe_;
  std::uint64_t seen_ = 0;   // version()
  std::uint64_t armed_ = 0;  // the version of the probe's gradient
  bool has_seen_gradients_ = false;
};

}  // namespace weft::shard
