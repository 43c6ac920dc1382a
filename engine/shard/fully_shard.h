// SPDX-License-Identifier: Apache-2.0
// FullyShardedDataParallel: data parallel training in which parameters, their gradients and the
// optimizer's state are spread over the ranks of a group, or along an axis of a mesh.
//
//   Net net;  // a torch::nn module holder, or std::shared_ptr<NetImpl>
//   weft::FullyShardedDataParallel sharded(net, group);
//   torch::optim::AdamW optimizer(net->parameters());  // after sharding: it steps shards
//   auto loss = loss_of(sharded(inputs), labels);
//   loss.backward();
//   optimizer.step();
//
// The model is written as for one device. It is cut into units (FullyShardOptions::units): each
// rank has its own rows of a unit's parameters, and the whole ones only while the unit's forward
// and backward use them. A unit's gradients are averaged behind its backward, each rank receiving
// its rows. A parameter belongs to the innermost unit that contains all its uses.
//
// model->parameters() are this rank's shards: rows of dimension 0, ceil(rows / ranks) each, so that
// the last ranks may have fewer, or none; dim() and names stay. A parameter of dimension 0 is on
// every rank. Gradients are in the shards' .grad.
//
// All ranks run the same forwards and backwards, which use the same units. Shards keep their dtype,
// device and shape: call module->to() before. Parameters are used in the forward that is called
// through the wrapper, and in its backward; elsewhere their use throws Caller, naming the
// parameter. Freeze and thaw parameters (requires_grad_ of the shards) between forwards, on all
// ranks alike. The values that a forward has used must not change before its backward. One thread
// at a time uses the object. It is moved, not copied, and must outlive the backward of its last
// forward.
//
// Not supported, and refused with an error: sparse gradients and max_norm of embeddings, parameters
// in a ParameterList or ParameterDict, different parameters with common memory, an optimizer that
// was made before sharding, memory that a module's member is given (set_data(), torch::load()),
// writing to parameters in place during forward, a backward with create_graph that reaches
// parameters, AutogradContext, and join() without the optimizer. Hooks, requires_grad_() and
// gradients of the modules' members are refused too: use those of the shards. In a forward the
// memory of a parameter is there once an operator has used it, so a kernel of your own takes the
// pointer of weight.detach().
//
// Not found: clone() of a module copies shards, and torch::save() writes them, unless
// FullParameters lives; and what adds up over model->parameters(), such as
// torch::nn::utils::clip_grad_norm_ and torch::optim::LBFGS, adds up this rank's rows only: use
// weft::clip_grad_norm_, and another optimizer.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/ddp/ddp.h>
#include <weft/engine/future/refusal.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/mesh/mesh.h>
#include <weft/engine/shard/fully_shard_options.h>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}

namespace weft {

// The ranks that train a sharded model: those of a group, or of a mesh. Over a mesh of one axis the
// model is sharded along it. Of two (HSDP): along the last, so that each row of the mesh has the
// whole model, and gradients are averaged along the first as well. A mesh of more is refused.
using GroupOrMesh = std::variant<ProcessGroup, Mesh>;

namespace shard {
class ShardedRoot;
}

// weft::join() of a sharded model: `optimizers` are those that step its shards in `steps`. Ranks
// that run out take part in the others' gathers and reductions with zeros, and step their own
// shards with these optimizers whenever the others do. The steps may be of any kind (accumulation,
// no_sync(), units that are left out, evaluation, clip_grad_norm_() of the whole module,
// SyncBatchNorm over the model's group, or over that of a mesh's axis which has all ranks), alike
// on all ranks that have inputs; but other collectives of the steps wait for the ranks that have
// run out until they time out. At the end buffers are those of a rank that was active last.
//
// Inside, nothing but these optimizers changes parameters, each at most once between two forwards;
// of their options only learning rates change, outside of the time between the end of backward and
// step(). The first parameter group of each has one more parameter meanwhile, by which its steps
// are seen. Gradients may be zeroed whenever the program likes, but between the last backward and
// step() only by these optimizers: in a step without a backward another way throws Caller, and
// behind a backward it is taken to follow the step. FullParameters, GradScaler and checkpoints of
// the optimizers throw Caller. If an exception ends the steps of one rank, the model's groups are
// aborted: all others throw Cancelled, which names the rank and the exception. Throws Caller on all
// ranks if the ranks give different optimizers, or one with parameters that are not the model's
// shards; otherwise as join().
WEFT_API void join(shard::ShardedRoot& model,
                   const std::vector<torch::optim::Optimizer*>& optimizers,
                   const std::function<void()>& steps, JoinOptions options = {});
// The same for one optimizer.
WEFT_API void join(shard::ShardedRoot& model, torch::optim::Optimizer& optimizer,
                   const std::function<void()>& steps, JoinOptions options = {});

namespace shard {

// The part of FullyShardedDataParallel that does not depend on the module's type.
class WEFT_API ShardedRoot : public Joinable {
 public:
  // While it lives, the backwards of the forwards made meanwhile keep whole gradients on each rank,
  // in addition to the shards' .grad, which is zeros meanwhile if it was undefined. The first
  // backward of another forward averages all that has accumulated. zero_grad() of the optimizer or
  // the module, called on all ranks, drops it, as does whatever else resets or writes the .grad,
  // and a backward that fails while it averages.
  // Hooks of shards are called with the average, and with an undefined tensor when no_sync() keeps.
  using NoSync = parallel::NoSync;
  // With `on` false it changes nothing: for loops that synchronise only in every nth step.
  NoSync no_sync(bool on = true);

 protected:
  // For Weft's own use.
  ShardedRoot(const std::shared_ptr<torch::nn::Module>& module, const GroupOrMesh& over,
              const FullyShardOptions& options);
  ~ShardedRoot() override;
  ShardedRoot(ShardedRoot&&) noexcept;
  ShardedRoot& operator=(ShardedRoot&&) noexcept;

  // For Weft's own use: lives during the root's forward.
  class WEFT_API Forward {
   public:
    explicit Forward(ShardedRoot& root);
    ~Forward();
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

   private:
    ShardedRoot& root_;
  };
  // For Weft's own use: see JoinedSteps.
  ProcessGroup& join_group() override;
  void check_join() const override;
  bool joins_alone() const override { return true; }
  void begin_step(const std::vector<bool>& active) override;
  void end_step() override;
  void fail(const std::string& why) override;
  void mirror_step(const parallel::detail::JoinStep& step) override;
  void take_over(int last_rank) override;
  // For Weft's own use: casts a floating-point tensor to FullyShardOptions::param_dtype.
  at::Tensor cast(const at::Tensor& input) const;
  template <class Argument>
  decltype(auto) prepared(Argument&& argument) const {
    if constexpr (std::is_same_v<std::remove_cvref_t<Argument>, at::Tensor>) {
      return cast(argument);
    } else {
      return std::forward<Argument>(argument);
    }
  }

 private:
  friend void weft::join(ShardedRoot& model,
                         const std::vector<torch::optim::Optimizer*>& optimizers,
                         const std::function<void()>& steps, JoinOptions options);
  bool is_synchronizing() const;
  struct State;
  State& state() const;  // throws Caller if this object has been moved from
  std::unique_ptr<State> state_;
};

// For Weft's own use.
WEFT_API void shard_as_unit(const std::shared_ptr<torch::nn::Module>& module,
                            const GroupOrMesh& over, const FullyShardOptions& options);
template <class M>
std::shared_ptr<torch::nn::Module> pointer_to(const torch::nn::ModuleHolder<M>& holder) {
  return holder.is_empty() ? nullptr : holder.ptr();
}
template <class M>
std::shared_ptr<torch::nn::Module> pointer_to(const std::shared_ptr<M>& module) {
  return module;
}

// True if one of the constructors makes FullyShardedDataParallel<Module>(Given…).
template <class Module, class... Given>
constexpr bool kTakes = (std::is_base_of_v<ShardedRoot, std::remove_cvref_t<Given>> ||
                         ...);  // copies, moves
template <class Module, class Given, class Over>
constexpr bool kTakes<Module, Given, Over> =
    parallel::detail::LeadsTo<Module, Given>&& std::is_convertible_v<Over, GroupOrMesh>;
template <class Module, class Given, class Over, class Options>
constexpr bool kTakes<Module, Given, Over, Options> =
    kTakes<Module, Given, Over>&& std::is_convertible_v<Options, FullyShardOptions>;

}  // namespace shard

template <class Module>
class FullyShardedDataParallel final : public shard::ShardedRoot {
 public:
  // Blocks until all ranks have called it. Copies rank 0's parameters and buffers to all ranks,
  // then keeps this rank's rows. Units that fully_shard() has made stay as they are. Throws Caller
  // on all ranks if the model or the options differ between them, the mesh has three axes, or a
  // parameter of one rank cannot be sharded.
  FullyShardedDataParallel(
      std::shared_ptr<Module> module, GroupOrMesh over,
      FullyShardOptions options = {}) requires std::is_base_of_v<torch::nn::Module, Module>
      : ShardedRoot(module, over, options), module_(std::move(module)) {}
  // The same for a module holder (TORCH_MODULE).
  FullyShardedDataParallel(
      const torch::nn::ModuleHolder<Module>& module, GroupOrMesh over,
      FullyShardOptions options = {}) requires std::is_base_of_v<torch::nn::Module, Module>
      : FullyShardedDataParallel(module.is_empty() ? nullptr : module.ptr(), std::move(over),
                                 std::move(options)) {}

  // For Weft's own use: reports wrong arguments.
  template <class... Given>
  requires(sizeof...(Given) > 0 &&
           !shard::kTakes<Module, Given...>) explicit FullyShardedDataParallel(Given&&...)
      : ShardedRoot(nullptr, ProcessGroup(), {}) {
    static_assert(weft::detail::kNever<Given...>,
                  "FullyShardedDataParallel takes a module's holder (TORCH_MODULE) or a "
                  "std::shared_ptr to the module, then the group or mesh and perhaps "
                  "FullyShardOptions: "
                  "FullyShardedDataParallel sharded(std::make_shared<NetImpl>(…), group)");
  }

  // Runs the module's forward, of any signature.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    if constexpr (!std::is_base_of_v<torch::nn::Module, Module>) {
      return weft::detail::Refused();  // the constructor's static_assert has reported it
    } else if constexpr (decltype(parallel::detail::refusal_of_forward<Module,
                                                                       Arguments...>())::accept()) {
      return output_of(std::forward<Arguments>(arguments)...);
    } else {
      return weft::detail::Refused();
    }
  }
  // Calls forward().
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  // The module that was wrapped.
  const std::shared_ptr<Module>& module() const { return module_; }

 private:
  template <class... Arguments>
  auto output_of(Arguments&&... arguments) {
    const Forward forward(*this);
    return module_->forward(prepared(std::forward<Arguments>(arguments))...);
  }

  std::shared_ptr<Module> module_;
};

// Deduces a module type from wrong arguments, so that the constructor can report them.
template <class... Given>
requires(sizeof...(Given) > 0 && !shard::kTakes<parallel::detail::ShownModule<Given...>, Given...>)
    FullyShardedDataParallel(Given&&...)
->FullyShardedDataParallel<parallel::detail::ShownModule<Given...>>;

// Makes the module one unit, in place, and returns it. All ranks call it, for the same modules in
// the same order. Its parameters that are no shards yet become shards at once, so that a large
// model need not be whole at any time. The root of the model is wrapped by FullyShardedDataParallel
// over the same group or mesh. Of the options, the unit keeps its own reshard_after_forward,
// param_dtype, reduce_dtype and offload; the others are the root's.
template <class Holder>
Holder fully_shard(Holder module, GroupOrMesh over, FullyShardOptions options = {}) {
  shard::shard_as_unit(shard::pointer_to(module), over, options);
  return module;
}

// While it lives, the parameters of a sharded model, or of a part of it, are whole on every rank:
// model.parameters() are whole leaves, and the members can be read anywhere. Does nothing for
// modules that are not sharded.
class WEFT_API FullParameters {
 public:
  // Collective; blocks. `writable`: at the end each rank keeps its own rows of what it has written
  // to model.parameters(), where all ranks write the same. Otherwise what was written is lost.
  explicit FullParameters(torch::nn::Module& model, bool writable = false);
  ~FullParameters();
  FullParameters(const FullParameters&) = delete;
  FullParameters& operator=(const FullParameters&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// For FullyShardOptions::units: every submodule of that type, a torch::nn module or its holder, is
// a unit.
template <class Block>
std::function<bool(const std::string&, const torch::nn::Module&)> units_of() {
  return [](const std::string&, const torch::nn::Module& module) {
    if constexpr (requires { typename Block::ContainedType; })
      return dynamic_cast<const typename Block::ContainedType*>(&module) != nullptr;
    else
      return dynamic_cast<const Block*>(&module) != nullptr;
  };
}

}  // namespace weft
