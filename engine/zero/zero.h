// ZeroRedundancyOptimizer: an optimizer whose state is kept once in a group instead of once on
// every rank (ZeRO stage 1, Rajbhandari et al., 2020). Semantics of
// torch.distributed.optim.ZeroRedundancyOptimizer.
//
//   weft::DistributedDataParallel ddp(net, group);
//   weft::ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), group,
//   torch::optim::AdamOptions(1e-3)); loss_of(ddp(inputs)).backward();   // the same gradients on
//   every rank zero.step();                       // each rank steps its parameters and sends them
//   to the others
//
// Every parameter has one owner, chosen so that the ranks' bytes are balanced. An owner's
// parameters are cut into shards; a shard travels while the next one is stepped. It is a libtorch
// optimizer: param_groups(), zero_grad(), schedulers and torch::save work as on any other. Used by
// one thread at a time.
//
//   zero.overlap_with(ddp);            // once: backward then steps what it has averaged, while it
//   computes the rest
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

namespace torch::optim {
class LBFGS;
}

namespace weft {

struct ZeroOptions {
  // A shard closes when it has reached so many bytes.
  std::size_t shard_bytes = 25 << 20;
  // The parameters become views of the buffers that travel: no copies, but their storage changes
  // when they are added. Who keeps a parameter's data() from before sees the old values, and
  // module->to(device) comes before.
  bool parameters_as_bucket_view = false;
};

namespace parallel {

class Replica;

// The part of ZeroRedundancyOptimizer that does not depend on the kind of optimizer.
class WEFT_API ShardedOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  ~ShardedOptimizer() override;

  // Steps this rank's parameters, and returns when those of all ranks are up to date (CUDA: when
  // the current stream will find them so). Collective. The closure is called once, before. Inside
  // weft::join it is called once for each synchronized backward, and the list names the model
  // before the optimizer: a rank that has run out goes on stepping its own parameters with the
  // gradients that the model's part in join leaves there. Where a rank's optimizer throws, that
  // passes through, and aborts the group: the other ranks, which may have stepped theirs, throw
  // Cancelled with the rank and the text at once.
  at::Tensor step(LossClosure closure = nullptr) override;

  // From now on each backward that synchronises `ddp` also steps: a shard's owner steps it when the
  // gradients of all its parameters are averages, and its values travel, while backward computes
  // the next gradients. step() then waits for what is under way and steps the rest, with the same
  // result as without this. Called by all ranks, at the same place, outside of a backward; for as
  // long as both live. `ddp` may have a comm hook.
  //
  // So parameters change during backward. step() follows every such backward, before the next
  // forward and before this object ends: what is under way then goes on. Options (a learning rate)
  // are those at the time of backward, and gradients are stepped as they are averaged: nothing can
  // change them between backward and step (clipping by a global norm, unscaling), and no step can
  // be left out. A graph that is used once more fails by autograd's check of versions, as it does
  // where backward still needs a parameter's value after its gradient (through parameter.detach()).
  //
  // Nothing is stepped before step() where DdpOptions::find_unused_parameters is set, as it is
  // known only at the end which parameters no rank has used; the same goes for the first backward
  // of a static graph, and for shards with sparse gradients, with frozen parameters alone, or with
  // one that a static graph leaves out on all ranks. A shard waits for the gradient that comes
  // last: of a small model, one shard on each rank, ZeroOptions::shard_bytes makes more. Host
  // memory: the steps run on a thread of the group, one after the other.
  //
  // What a step throws on its owner aborts the group, and comes from this rank's backward or
  // step(); from the others' comes Cancelled, as with step(). So does what ends a rank's backward
  // instead of averages. Throws Caller where `ddp` lacks a parameter of this that requires a
  // gradient, has another group or another such optimizer, and inside of weft::join. Backwards
  // inside of an AutogradContext, weft::join, and CUDA graphs are refused afterwards (Caller).
  void overlap_with(Replica& ddp);

  // Collective. Owners of earlier groups stay. Throws Caller, on all ranks, where the ranks'
  // parameters differ in shape or dtype, and for a parameter that is here already.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Brings the state of all parameters to one rank, where save() can then write it. Collective;
  // holds until the next step.
  void consolidate_state_dict(int to = 0);
  // What the plain optimizer with the same parameters would write, so that either can load it, in a
  // group of any size. Throws Caller where the state has not been consolidated.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Takes the options, and of the state this rank's part. Called on every rank, with the same
  // archive.
  void load(torch::serialize::InputArchive& archive) override;
  // The same in two steps: an optimizer of its kind over all parameters, which loads; and what it
  // has loaded, which this takes from it.
  std::unique_ptr<torch::optim::Optimizer> plain() const;
  void take(torch::optim::Optimizer& whole);

  // The rank that steps it. Throws Caller for a parameter that was not given.
  int owner(const at::Tensor& parameter) const;
  // Of this rank's shards, in the order in which they are stepped.
  std::vector<const torch::optim::Optimizer*> local_optimizers() const;

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;
  // Blocks until all ranks have come. Warns where parameters in host memory have other values on
  // some ranks.
  ShardedOptimizer(const Groups& groups, ProcessGroup group, const Make& make, ZeroOptions options);

  ProcessGroup& join_group() override { return group_; }
  void check_join() const override;
  void mirror_step(const JoinStep& step) override;
  void take_over(int last_rank) override;

 private:
  struct Shard {
    std::size_t group = 0;  // of param_groups()
    int owner = 0;
    std::vector<at::Tensor> parameters;
    at::Tensor flat;  // the parameters' memory, if they are views
    // On its owner only; shared with a step under way, which may outlive this.
    std::shared_ptr<torch::optim::Optimizer> optimizer;
  };
  struct Overlap;
  void lay_out(std::size_t first_group);
  Shard make_shard(std::size_t group, int owner, std::vector<at::Tensor> parameters) const;
  void check_layout() const;
  void step_shards();
  void step_own(Shard& shard);
  // Gives its optimizer the options of its group.
  void prepare_step(Shard& shard) const;
  // The shard's own memory where that is one piece, its buffer or its only parameter; else
  // undefined.
  static at::Tensor whole_memory(const Shard& shard);
  // The shard's values in one piece: that, or a copy (without values elsewhere than here).
  at::Tensor travelling(const Shard& shard) const;
  // What the owner has sent becomes the parameters' values.
  static void land(const at::Tensor& flat, const std::vector<at::Tensor>& parameters);
  // Throws Caller between a backward that steps and step().
  void check_stepped(const char* what) const;
  bool is_mine(const Shard& shard) const { return shard.owner == group_.rank(); }
  // An optimizer over all parameters with the state of this rank's.
  std::unique_ptr<torch::optim::Optimizer> whole_with_local_state() const;

  ProcessGroup group_;
  Make make_;
  ZeroOptions options_;
  std::vector<std::size_t> loads_;               // bytes by rank
  std::unordered_map<const void*, int> owners_;  // by parameter
  std::vector<Shard> shards_;  // in the order in which they are stepped and sent, on all ranks
  std::unique_ptr<torch::optim::Optimizer> all_;  // with the consolidated state
  std::unique_ptr<Overlap> overlap_;              // after overlap_with
};

}  // namespace parallel

namespace parallel {

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

}  // namespace parallel

// O: a libtorch optimizer, which takes parameter groups and options and treats each parameter by
// itself.
template <class O>
class ZeroRedundancyOptimizer final : public parallel::ShardedOptimizer {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, O>,
                "ZeroRedundancyOptimizer takes a libtorch optimizer class");
  static_assert(!std::derived_from<O, torch::optim::LBFGS>,
                "LBFGS looks at all parameters together, so its step cannot be divided; use Adam, "
                "AdamW, SGD, RMSprop, Adagrad");

 public:
  // Collective; blocks until all ranks have come. Every rank gives the same parameters in the same
  // order, with the same values (as after DistributedDataParallel's constructor). Throws Caller, on
  // all ranks, where shapes or dtypes differ.
  template <class Options>
  requires std::constructible_from<O, std::vector<torch::optim::OptimizerParamGroup>, Options>
  ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, ProcessGroup group,
                          const Options& defaults, ZeroOptions options = {})
      : ShardedOptimizer(
            groups, std::move(group),
            [defaults](const Groups& some) { return std::make_unique<O>(some, defaults); },
            options) {}
  template <class Options>
  requires std::constructible_from<O, std::vector<torch::optim::OptimizerParamGroup>, Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, ProcessGroup group,
                          const Options& defaults, ZeroOptions options = {})
      : ZeroRedundancyOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{std::move(parameters)}, std::move(group),
            defaults, options) {}
  template <class... Given>
  requires(sizeof...(Given) > 1 &&
           !parallel::kShards<O, Given...>) explicit ZeroRedundancyOptimizer(const Given&...)
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
