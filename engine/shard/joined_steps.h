// SPDX-License-Identifier: Apache-2.0
// A sharded model inside of weft::join, on a rank that has inputs: it tells the ranks that have run
// out what its step does (step_messages.h), and these repeat it (mirrored_steps.h). So any step
// works, and the shards and optimizers of all ranks go on as if none had run out. While no rank has
// run out, nothing is sent.
//
// join() owns it, on each rank for one call. Thread-safe where it says so; otherwise the thread
// that runs the join uses it. mirror_step() blocks until the other ranks' step has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>
#include <weft/engine/shard/gradient_versions.h>
#include <weft/engine/shard/mirrored_steps.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/shard/step_messages.h>
#include <weft/engine/shard/watched_optimizer.h>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace weft::shard {

// Called before this rank clips: inside of weft::join of the model, has the ranks that have run out
// clip too. Throws Caller for a clipping in which they cannot take part.
void before_clip(const torch::nn::Module& model, double max_norm, double norm_type, bool is_over);
// Called when it has clipped: the model's gradients were not written by the program.
void after_clip(const torch::nn::Module& model);

// Called before this rank adds up a tensor over the group: inside of weft::join of a model over
// that group, or over a mesh of whose axes one has all ranks and that group, has the ranks that
// have run out add zeros. Returns false if they do not.
bool before_sum(const ProcessGroup& group, const at::Tensor& tensor);

class JoinedSteps {
 public:
  // Throws Caller for an optimizer that cannot go on without inputs, or that has parameters which
  // are not the model's shards.
  JoinedSteps(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ShardedModel> model,
              ProcessGroup group, const std::vector<torch::optim::Optimizer*>& optimizers);
  ~JoinedSteps();
  JoinedSteps(const JoinedSteps&) = delete;
  JoinedSteps& operator=(const JoinedSteps&) = delete;

  // A text that must be the same on all ranks.
  std::string description() const;

  // Around a step of this rank. `active`: by rank, whether it takes part.
  void begin_step(const std::vector<bool>& active);
  void end_step();
  // Called before a forward of this rank. Throws Caller in a capture, and after a failed backward.
  void check_forward() const;
  // Both are called before the operation begins, under the model's mutex, on any thread.
  // `parameters`: those of the unit that are trained.
  void gathers(const Unit& unit);
  void reduces(const Unit& unit, const std::vector<std::size_t>& parameters);
  // Called under the model's mutex when a backward begins. The program may have zeroed gradients
  // since the last one, also by the module's zero_grad().
  void begins_backward() { reduces_first_ = messages_.has_readers(); }
  // See before_clip().
  static void clips(const torch::nn::Module& model, double max_norm, double norm_type,
                    bool is_over);
  // See after_clip().
  static void has_clipped(const torch::nn::Module& model);

  // See before_sum().
  bool sums(const ProcessGroup& group, const at::Tensor& tensor) const;

  // This rank has run out: see MirroredSteps::mirror_step().
  void mirror_step(int leader, int divisor) { mirrored_.mirror_step(leader, divisor); }
  // All ranks have run out. The next step records the order of units anew: a rank that has mirrored
  // steps does not know it, and all must gather ahead alike.
  void end();
  // This rank cannot go on: fails the operations of all ranks.
  void abort(const std::string& why);

 private:
  // The .grad of a shard, to which the next backward adds: a gradient, the stand-in of one that
  // no_sync() keeps, nothing, or zeros.
  enum class Has { Unknown, Gradient, StandIn, Nothing, Zeros };
  Has state_of(const Unit& unit, std::size_t parameter, const at::Tensor& shard) const;
  // Says in the message what a shard has in .grad.
  static void put(Has state, std::size_t parameter, StepMessage& message);
  // True if an optimizer has cleared gradients.
  bool note_cleared();
  bool note_cleared(WatchedOptimizer& optimizer);
  // Tells the ranks that have run out which gradients differ from what they were last told.
  void tell_cleared();
  void require_clear_order(const WatchedOptimizer& optimizer) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<ShardedModel> model_;
  const ProcessGroup group_;
  const std::vector<std::unique_ptr<WatchedOptimizer>> optimizers_;
  std::vector<std::vector<double>> rates_;  // of each, as of the last reduction
  StepMessages messages_;
  MirroredSteps mirrored_;
  bool reduces_first_ = false;  // the next reduction is the first of the step, or of a backward
  bool has_reduced_ = false;    // in this step
  struct Since {
    bool cleared = false;     // by its optimizer, since its last reduction
    Has told = Has::Unknown;  // what the others were told since its last reduction in this step
  };
  std::vector<std::vector<Since>> since_;  // by unit and parameter
  std::unique_ptr<GradientVersions> versions_;
};

}  // namespace weft::shard
