// SPDX-License-Identifier: Apache-2.0
// ZeroRedundancyOptimizer: an optimizer whose state is kept once in a group instead of once on
// every rank (ZeRO stage 1, Rajbhandari et al., 2020). Semantics of
// torch.distributed.optim.ZeroRedundancyOptimizer.
//
//   weft::DistributedDataParallel ddp(net, group);
//   weft::ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), group,
//                                                          torch::optim::AdamOptions(1e-3));
//   loss_of(ddp(inputs)).backward();  // the same gradients on every rank
//   zero.step();                      // each rank steps its parameters and sends them
//
// Every parameter has one owner, chosen so that the ranks' bytes are balanced. An owner's
// parameters are cut into shards; a shard travels while the next one is stepped. It is a libtorch
// optimizer: param_groups(), zero_grad(), schedulers and torch::save work as on any other. Used by
// one thread at a time.
//
//   zero.overlap_with(ddp);  // called once: from then on shards are stepped during backward
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <weft/base/export.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/future/refusal.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/zero/shard.h>

namespace torch::optim {
class LBFGS;
}

namespace weft {

// Options of ZeroRedundancyOptimizer.
struct ZeroOptions {
  // A shard closes when it has reached this many bytes.
  std::size_t shard_bytes = 25 << 20;
  // The parameters become views of the buffers that travel, which saves copies, but their storage
  // changes when they are added. A data() that was taken before still shows the old values, and
  // module->to(device) must be called before.
  bool parameters_as_bucket_view = false;
};

namespace parallel {

class Replica;

// The part of ZeroRedundancyOptimizer that does not depend on the kind of optimizer.
class WEFT_API ShardedOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  ~ShardedOptimizer() override;

  // Collective. Steps this rank's parameters, and returns when those of all ranks are up to date
  // (CUDA: when they are so in the order of the current stream). Calls the closure once, before.
  // Inside weft::join it is called once for each synchronised backward, and join's list names the
  // model before the optimizer: a rank that has run out goes on stepping its own parameters with
  // the gradients (clipped, for example) and learning rates that the lowest rank with inputs has
  // at step(). If a rank's optimizer throws, step()
  // rethrows the exception there and aborts the group: the other ranks, which may have stepped
  // their parameters, throw Cancelled at once, with the rank and the text.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Makes each later backward that synchronises `ddp` step as well. When the gradients of all
  // parameters of a shard are averages, its owner steps it and its values travel, while backward
  // computes the next gradients. step() then waits for these and steps the rest; the result is the
  // same as without overlap_with. Called by all ranks, at the same place, outside of a backward; it
  // applies as long as both objects live. `ddp` may have a comm hook.
  //
  // So parameters change during backward. step() must follow every such backward, before the next
  // forward and before this object is destroyed, since steps and broadcasts are still running.
  // Options (a learning rate) are those at the time of backward. Gradients are used as soon as they
  // are averaged: nothing can change them between backward and step (clipping by a global norm,
  // unscaling), and no step can be left out. A second backward of the same graph fails by
  // autograd's check of versions; so does a backward that needs a parameter's value after its
  // gradient (through parameter.detach()).
  //
  // Some shards are stepped only in step(): all shards if DdpOptions::find_unused_parameters is set
  // (backward knows only at its end which parameters no rank has used) and in the first backward of
  // a static graph; and shards that have sparse gradients, only frozen parameters, or a parameter
  // that a static graph leaves out on all ranks. A shard waits for the last of its gradients; a
  // small model has one shard on each rank, and a smaller ZeroOptions::shard_bytes makes more. In
  // host memory the steps run on a thread of the group, one after the other.
  //
  // If a step throws on its owner, the group is aborted: this rank's backward or step() throws that
  // exception, and the others' throw Cancelled, as with step(). The same happens if a rank's
  // backward ends without averages. Throws Caller if `ddp` lacks one of this optimizer's parameters
  // that requires a gradient, has another group, or has another such optimizer; and inside of
  // weft::join. Afterwards backwards inside of an AutogradContext, weft::join, and CUDA graphs
  // throw Caller.
  void overlap_with(Replica& ddp);

  // Collective. Parameters of earlier groups keep their owners. Throws Caller on all ranks if the
  // ranks' parameters differ in shape or dtype, and for a parameter that this optimizer already
  // has.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Collective. Collects the state of all parameters on one rank, where save() can write it until
  // the next step.
  void consolidate_state_dict(int to = 0);
  // Writes the same as the plain optimizer over the same parameters, so that either can load it, in
  // a group of any size. Throws Caller if the state has not been consolidated.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Takes the options and this rank's part of the state. Called on every rank with the same
  // archive.
  void load(torch::serialize::InputArchive& archive) override;
  // For Weft's own use.
  // load() in two steps: plain() returns an optimizer of this kind over all parameters, which the
  // caller loads; take() takes over the state that it has loaded.
  std::unique_ptr<torch::optim::Optimizer> plain() const;
  void take(torch::optim::Optimizer& whole);

  // For Weft's own use.
  // The ranks that make each step together. Throws Caller if backward steps (overlap_with), since
  // gradients cannot be unscaled between backward and step() then.
  const ProcessGroup& group_of_steps() const;

  // The rank that steps the parameter. Throws Caller if this optimizer does not have it.
  int owner(const at::Tensor& parameter) const;
  // The optimizers of this rank's shards, in the order in which they are stepped.
  std::vector<const torch::optim::Optimizer*> local_optimizers() const;

 protected:
  // For Weft's own use.
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;
  // Blocks until all ranks have called it. Warns if parameters in host memory have different values
  // on some ranks.
  ShardedOptimizer(const Groups& groups, ProcessGroup group, const Make& make, ZeroOptions options);

  // For Weft's own use.
  ProcessGroup& join_group() override { return group_; }
  void check_join() const override;
  void begin_step(const std::vector<bool>& active) override { active_ = active; }
  void mirror_step(const detail::JoinStep& step) override;
  void take_over(int last_rank) override;

 private:
  struct Overlap;
  void lay_out(std::size_t first_group);
  Shard make_shard(std::size_t group, int owner, std::vector<at::Tensor> parameters) const;
  void check_layout() const;
  void step_shards();
  // Collective. Gives the owners of shards that have run out the gradients and the learning rates
  // of `leader`, the lowest active rank.
  void hand_over(const std::vector<bool>& active, int leader);
  void step_own(Shard& shard);
  // Gives the shard's optimizer the options of its parameter group.
  void prepare_step(Shard& shard) const;
  // Throws Caller between a backward that steps and step().
  void check_stepped(const char* what) const;
  bool is_mine(const Shard& shard) const { return shard.owner == group_.rank(); }
  // Returns an optimizer over all parameters with the state of this rank's.
  std::unique_ptr<torch::optim::Optimizer> whole_with_local_state() const;

  ProcessGroup group_;
  Make make_;
  ZeroOptions options_;
  std::vector<std::size_t> loads_;               // bytes by rank
  std::unordered_map<const void*, int> owners_;  // by parameter
  std::vector<Shard> shards_;  // in the order in which all ranks step and send them
  std::unique_ptr<torch::optim::Optimizer> all_;  // with the consolidated state
  std::unique_ptr<Overlap> overlap_;              // set by overlap_with
  std::vector<bool> active_;                      // in this step of weft::join, by rank
};

}  // namespace parallel

namespace parallel::detail {

// True if one of the constructors makes ZeroRedundancyOptimizer<O>(Given…).
template <class O, class... Given>
constexpr bool kShards = false;
template <class O, class Parameters, class Group, class Options>
constexpr bool kShards<O, Parameters, Group, Options> =
    (std::is_convertible_v<Parameters, std::vector<torch::optim::OptimizerParamGroup>> ||
     std::is_convertible_v<Parameters, std::vector<at::Tensor>>)&&std::
        is_convertible_v<Group, ProcessGroup>&& std::is_constructible_v<
            O, std::vector<torch::optim::OptimizerParamGroup>, Options>;
template <class O, class Parameters, class Group, class Options, class How>
constexpr bool kShards<O, Parameters, Group, Options, How> =
    kShards<O, Parameters, Group, Options>&& std::is_convertible_v<How, ZeroOptions>;

}  // namespace parallel::detail

// O: a libtorch optimizer that takes parameter groups and options and steps each parameter
// independently of the others.
template <class O>
class ZeroRedundancyOptimizer final : public parallel::ShardedOptimizer {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, O>,
                "ZeroRedundancyOptimizer takes a libtorch optimizer class");
  static_assert(!std::derived_from<O, torch::optim::LBFGS>,
                "LBFGS looks at all parameters together, so its step cannot be divided; use Adam, "
                "AdamW, SGD, RMSprop, Adagrad");

 public:
  // Collective; blocks until all ranks have called it. Every rank gives the same parameters in the
  // same order, with the same values (as after DistributedDataParallel's constructor). Throws
  // Caller on all ranks if shapes or dtypes differ.
  template <class Options>
  requires std::constructible_from<O, std::vector<torch::optim::OptimizerParamGroup>, Options>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, ProcessGroup group,
                          const Options& defaults, ZeroOptions options = {})
      : ShardedOptimizer(
            groups, std::move(group),
            [defaults](const Groups& some) { return std::make_unique<O>(some, defaults); },
            options) {}
  // The same for parameters of one group.
  template <class Options>
  requires std::constructible_from<O, std::vector<torch::optim::OptimizerParamGroup>, Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, ProcessGroup group,
                          const Options& defaults, ZeroOptions options = {})
      : ZeroRedundancyOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{std::move(parameters)}, std::move(group),
            defaults, options) {}
  // For Weft's own use: reports wrong arguments.
  template <class... Given>
  requires(
      sizeof...(Given) > 1 &&
      !parallel::detail::kShards<O, Given...>) explicit ZeroRedundancyOptimizer(const Given&...)
      : ShardedOptimizer(Groups(), ProcessGroup(), Make(), ZeroOptions()) {
    static_assert(
        !std::derived_from<O, torch::optim::Optimizer> || weft::detail::kNever<Given...>,
        "ZeroRedundancyOptimizer takes the parameters or parameter groups, the group, the options "
        "of its kind of "
        "optimizer, and perhaps ZeroOptions: ZeroRedundancyOptimizer<torch::optim::SGD> optimizer("
        "net->parameters(), group, torch::optim::SGDOptions(0.1))");
  }
};

}  // namespace weft
