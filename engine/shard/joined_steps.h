// SPDX-License-Identifier: Apache-2.0
// A sharded model inside of weft::join. The lowest rank that has inputs tells the ranks that have
// run out, by one small message each, what it does next: gather a unit, reduce its gradients, clip,
// step an optimizer. They do the same with zeros for gradients, so that any step works, and their
// shards and optimizers go on as those of the others do. While no rank has run out, nothing is
// sent.
//
// join() owns it, on each rank for one call. Thread-safe where it says so; else the thread that
// runs the join. mirror_step() blocks until the other ranks' step has ended.
//
// It has 32 functions, because each thing that a step does has one that tells it and one that
// repeats it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>
#include <weft/engine/shard/gradient_versions.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/shard/watched_optimizer.h>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace weft::shard {

// clip_grad_norm_ without its result, for ranks that have run out; its file sets it.
using Clip = void (*)(const torch::nn::Module& model, double max_norm, double norm_type);
void set_mirrored_clip(Clip clip);
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
  // Called before the operation begins, under the model's mutex, on any thread. `parameters`: those
  // of the unit that are trained.
  // Before a forward of this rank. Throws Caller in a capture, and after a failed backward.
  void check_forward() const;
  void gathers(const Unit& unit);
  void reduces(const Unit& unit, const std::vector<std::size_t>& parameters);
  // See before_clip().
  static void clips(const torch::nn::Module& model, double max_norm, double norm_type,
                    bool is_over);
  // See after_clip().
  static void has_clipped(const torch::nn::Module& model);

  // See before_sum().
  bool sums(const ProcessGroup& group, const at::Tensor& tensor) const;

  // Does what the rank `leader` tells, until its step has ended. `divisor`: of gradients.
  void mirror_step(int leader, int divisor);
  // All ranks have run out. The next step records the order of units anew: a rank that has mirrored
  // steps does not know it, and all must gather ahead alike.
  void end();
  // This rank cannot go on: fails the operations of all ranks.
  void abort(const std::string& why);

 private:
  std::array<ProcessGroup, 3> groups() const;
  // A reduction whose result this rank has not added to its gradients.
  struct Mirrored {
    std::vector<at::Tensor> shards, gradients;
    std::shared_ptr<Reduction> reduction;
  };
  // Numbers of one length: a kind, which unit or optimizer, bits, and the bytes of doubles.
  using Message = std::vector<std::int64_t>;
  // What a shard has in .grad, to which the next gradient is added.
  enum class Has { Unknown, Gradient, StandIn, Nothing, Zeros };
  Has state_of(const Unit& unit, std::size_t parameter, const at::Tensor& shard) const;
  void put(Has state, std::size_t parameter, Message& message) const;
  // True if an optimizer has cleared gradients.
  bool note_cleared();
  bool note_cleared(WatchedOptimizer& optimizer);
  // Tells what has changed since it was last told.
  void tell_cleared();
  void require_clear_order(const WatchedOptimizer& optimizer) const;
  Message message(std::int64_t kind, std::size_t which = 0) const;
  static std::int64_t* bits(Message& message) { return message.data() + 2; }
  std::int64_t* doubles(Message& message) const { return message.data() + 2 + 3 * words_; }
  void tell(const Message& message) const;
  void mirror(Message& told);
  void mirror_gather(std::size_t unit);
  void mirror_reduce(std::size_t unit, Message& told);
  void mirror_sum(const Message& told);
  void mirror_clear(const std::vector<at::Tensor>& shards, Message& told) const
      WEFT_REQUIRES(model_->mutex_);
  void finish_reductions();

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<ShardedModel> model_;
  const ProcessGroup group_;
  std::vector<std::unique_ptr<WatchedOptimizer>> optimizers_;
  std::vector<std::vector<double>> rates_;  // of each, as of the last reduction
  std::size_t words_ = 0;                   // of bits, one for each parameter of a unit
  std::size_t doubles_ = 2;                 // in a message
  std::vector<int> told_;                   // the ranks that this rank tells
  bool reduces_first_ = false;              // the next reduction is the first of the step
  bool has_reduced_ = false;                // in this step
  struct Since {
    bool cleared = false;     // by its optimizer, since its last reduction
    Has told = Has::Unknown;  // to told_, since its last reduction in this step
  };
  std::vector<std::vector<Since>> since_;  // by unit and parameter
  std::vector<Mirrored> mirrored_;
  std::unique_ptr<GradientVersions> versions_;
};

}  // namespace weft::shard
