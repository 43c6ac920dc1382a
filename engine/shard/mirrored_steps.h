// SPDX-License-Identifier: Apache-2.0
// A sharded model inside of weft::join, on a rank that has run out: it repeats the steps of the
// ranks that have inputs, with zeros for gradients, as one of them tells it (step_messages.h).
//
// JoinedSteps owns it. The thread that runs the join uses it. mirror_step() blocks until the other
// ranks' step has ended.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/shard/step_messages.h>
#include <weft/engine/shard/watched_optimizer.h>

namespace torch::nn {
class Module;
}

namespace weft::shard {

// clip_grad_norm_ without its result; its file sets it.
using Clip = void (*)(const torch::nn::Module& model, double max_norm, double norm_type);
void set_mirrored_clip(Clip clip);

class MirroredSteps {
 public:
  // All of these outlive it.
  MirroredSteps(torch::nn::Module& module, ShardedModel& model,
                const std::vector<std::unique_ptr<WatchedOptimizer>>& optimizers,
                const StepMessages& messages)
      : module_(module), model_(model), optimizers_(optimizers), messages_(messages) {}

  // Does what the rank `leader` tells, until its step has ended. `divisor`: of gradients.
  void mirror_step(int leader, int divisor);

 private:
  // A reduction whose result this rank has not added to its gradients.
  struct Mirrored {
    std::vector<at::Tensor> shards, gradients;
    std::shared_ptr<Reduction> reduction;
  };
  void mirror(const StepMessage& told);
  void gather(std::size_t unit);
  void reduce(const StepMessage& told);
  void sum(const StepMessage& told);
  void clear(const std::vector<at::Tensor>& shards, const StepMessage& told) const
      WEFT_REQUIRES(model_.mutex_);
  void finish_reductions();

  torch::nn::Module& module_;
  ShardedModel& model_;
  const std::vector<std::unique_ptr<WatchedOptimizer>>& optimizers_;
  const StepMessages& messages_;
  std::vector<Mirrored> mirrored_;
};

}  // namespace weft::shard
