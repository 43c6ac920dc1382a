// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: one module replicated on every rank of a group. Each rank computes on
// its own inputs; gradients are averaged over the ranks while the backward pass still runs.
// Semantics of torch.nn.parallel.DistributedDataParallel.
//
//   Net net;  // a torch::nn module holder, or std::shared_ptr<NetImpl>
//   weft::DistributedDataParallel ddp(net, group);
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   auto loss = loss_of(ddp(inputs), labels);
//   loss.backward();  // gradients in parameter.grad() are averages
//   optimizer.step();
//
// The module may lie on the host, on the rank's GPU, and on further GPUs of that rank, in the same
// way on all ranks. For each further GPU the constructor makes a group of the same ranks, so that
// the buckets of all GPUs travel at the same time.
//
// All ranks run the same number of forward and backward passes (weft::join where they cannot).
// Every backward of an output is averaged, in any order of backwards and forwards, unless its
// forward was made inside of no_sync(). Parameters keep their type, device and shape: call
// module->to() before wrapping. They may be frozen and thawed between forwards, on all ranks alike.
// Submodules and parameters must not be added, removed or replaced. One thread at a time uses the
// object. It is moved, not copied, and must outlive the backward of its last forward (a later
// backward is a Caller error).
//
// Ranks keep the same parameters only if they change them alike. In steps 2, 4, 8, …, 1024, 2048,
// 3072, … rank 0 compares sums over the parameters in host memory with the other ranks', and warns
// once if they differ by more than rounding.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <weft/base/export.h>
#include <weft/engine/ddp/comm_hooks.h>
#include <weft/engine/ddp/ddp_options.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/ddp/no_sync.h>
#include <weft/engine/future/refusal.h>
#include <weft/engine/group/process_group.h>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace weft {

namespace parallel {

class Reducer;
class ShardedOptimizer;

// The part of DistributedDataParallel that does not depend on the module's type.
class WEFT_API Replica : public Joinable {
 public:
  // While it lives, backwards of the forwards made meanwhile accumulate gradients locally, whenever
  // these backwards run. The first backward of another forward reduces all that has accumulated.
  using NoSync = parallel::NoSync;
  // With `on` false it changes nothing: for loops that synchronise only in every nth step.
  NoSync no_sync(bool on = true);

  // Called once, before the first backward that averages gradients; throws Caller otherwise.
  void register_comm_hook(CommHook hook);
  // The statistics of this rank so far.
  DdpStats stats() const;

 protected:
  // For Weft's own use.
  // Compares the model and the options with rank 0's (except gradient_as_bucket_view), then copies
  // rank 0's parameters and buffers. Throws Caller on all ranks if they differ, if no parameter
  // requires a gradient, or if a tensor is sparse or expanded and so cannot be copied to other
  // ranks.
  Replica(const std::shared_ptr<torch::nn::Module>& module, ProcessGroup group,
          const DdpOptions& options);
  ~Replica() override;
  Replica(Replica&&) noexcept;
  Replica& operator=(Replica&&) noexcept;

  // For Weft's own use.
  // Throws Caller if the module no longer has the parameters that it had when it was wrapped; the
  // error names one.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  // True if after_forward needs the outputs.
  static bool tracks_outputs();

  // For Weft's own use.
  ProcessGroup& join_group() override;
  void check_join() const override;
  bool trains() const override;
  void mirror_step(const detail::JoinStep& step) override;
  void take_over(int last_rank) override;

 private:
  friend class ShardedOptimizer;  // which may step in its backward
  bool is_synchronizing() const;
  void follow_frozen();
  const std::shared_ptr<Reducer>& reducer() const;
  struct State;
  State& state() const;  // throws Caller if this object has been moved from
  std::unique_ptr<State> state_;
};

namespace detail {

// The module type of a holder or a std::shared_ptr.
template <class M>
std::type_identity<M> module_of(const torch::nn::ModuleHolder<M>&);
template <class M>
std::type_identity<M> module_of(const std::shared_ptr<M>&);

// True if one of the constructors makes DistributedDataParallel<Module>(Given…).
template <class Module, class... Given>
constexpr bool kTakes = (std::is_base_of_v<Replica, std::remove_cvref_t<Given>> ||
                         ...);  // copies, moves
template <class Module, class Given>
concept LeadsTo = std::is_base_of_v<torch::nn::Module, Module> &&
    (std::is_convertible_v<Given, std::shared_ptr<Module>> ||
     std::is_convertible_v<Given, const torch::nn::ModuleHolder<Module>&>);
template <class Module, class Given, class Group>
constexpr bool kTakes<Module, Given, Group> =
    LeadsTo<Module, Given>&& std::is_convertible_v<Group, ProcessGroup>;
template <class Module, class Given, class Group, class Options>
constexpr bool kTakes<Module, Given, Group, Options> =
    kTakes<Module, Given, Group>&& std::is_convertible_v<Options, DdpOptions>;

// The Module of DistributedDataParallel(Given…) if no constructor tells it.
template <class Given, class... More>
consteval auto shown_module() {
  if constexpr (requires(const Given& given) { module_of(given); }) {
    return decltype(module_of(std::declval<const Given&>()))();
  } else if constexpr (std::is_base_of_v<torch::nn::Module, Given>) {
    return std::type_identity<Given>();
  } else {
    return std::type_identity<weft::detail::Refused>();
  }
}
template <class... Given>
using ShownModule = typename decltype(shown_module<std::remove_cvref_t<Given>...>())::type;

template <class... About>
struct TakesOtherInputs : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "the module's forward() does not take these arguments, or it has no forward(): "
                  "ddp(…) passes its arguments on to forward()");
    return false;
  }
};
// The reason why the module's forward() cannot be called with A.
template <class Module, class... A>
consteval auto refusal_of_forward() {
  if constexpr (requires(Module & module, A && ... inputs) {
                  module.forward(std::forward<A>(inputs)...);
                }) {
    return weft::detail::Fine();
  } else {
    return TakesOtherInputs<Module, A...>();
  }
}

}  // namespace detail
}  // namespace parallel

template <class Module>
class DistributedDataParallel final : public parallel::Replica {
 public:
  // Blocks until all ranks have called it. Throws Caller on all ranks if the model or the options
  // differ between them.
  DistributedDataParallel(
      std::shared_ptr<Module> module, ProcessGroup group,
      DdpOptions options = {}) requires std::is_base_of_v<torch::nn::Module, Module>
      : Replica(module, std::move(group), options), module_(std::move(module)) {}
  // The same for a module holder (TORCH_MODULE).
  DistributedDataParallel(
      const torch::nn::ModuleHolder<Module>& module, ProcessGroup group,
      DdpOptions options = {}) requires std::is_base_of_v<torch::nn::Module, Module>
      : DistributedDataParallel(module.is_empty() ? nullptr : module.ptr(), std::move(group),
                                options) {}

  // For Weft's own use: reports wrong arguments.
  template <class... Given>
  requires(sizeof...(Given) > 0 &&
           !parallel::detail::kTakes<Module, Given...>) explicit DistributedDataParallel(Given&&...)
      : Replica(nullptr, ProcessGroup(), {}) {
    static_assert(weft::detail::kNever<Given...>,
                  "DistributedDataParallel takes a module's holder (TORCH_MODULE) or a "
                  "std::shared_ptr to the module, then "
                  "the group and perhaps DdpOptions: DistributedDataParallel "
                  "ddp(std::make_shared<NetImpl>(…), group)");
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
    before_forward();
    using Output = decltype(module_->forward(std::forward<Arguments>(arguments)...));
    if constexpr (std::is_void_v<Output>) {
      module_->forward(std::forward<Arguments>(arguments)...);
      after_forward({});
    } else {
      std::remove_cvref_t<Output> output = module_->forward(std::forward<Arguments>(arguments)...);
      std::vector<at::Tensor> tensors;
      if (tracks_outputs())
        weft::detail::for_each_tensor(output,
                                      [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
      after_forward(tensors);
      return output;
    }
  }

  std::shared_ptr<Module> module_;
};

// Deduces a module type from wrong arguments, so that the constructor can report them.
template <class... Given>
requires(sizeof...(Given) > 0 &&
         !parallel::detail::kTakes<parallel::detail::ShownModule<Given...>, Given...>)
    DistributedDataParallel(Given&&...)
->DistributedDataParallel<parallel::detail::ShownModule<Given...>>;

}  // namespace weft
