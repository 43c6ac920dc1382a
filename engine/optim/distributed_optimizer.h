// SPDX-License-Identifier: Apache-2.0
// DistributedOptimizer: one optimizer for parameters that live on several workers. Each owner has a
// local optimizer for the parameters that it owns, and step() runs all of them at once, with the
// gradients of an autograd context. Semantics of torch.distributed.optim.DistributedOptimizer; but
// an error names all owners that failed instead of one.
//
//   DistributedOptimizer<torch::optim::SGD> optimizer(parameter_rrefs,
//                                                     torch::optim::SGDOptions(0.05));
//   AutogradContext context(agent);
//   context.backward({loss});
//   optimizer.step(context);
//
// The program of every owner must contain the same instantiation: a call of the constructor
// anywhere in it is enough.
#pragma once

#include <concepts>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <weft/base/export.h>
#include <weft/base/fence.h>
#include <weft/base/mutex.h>
#include <weft/engine/autograd/autograd_context.h>
#include <weft/engine/optim/options_on_wire.h>
#include <weft/engine/rpc/agent.h>

namespace torch::optim {
class LBFGS;
}

namespace weft {

// Whether steps of several optimizers may run at once on an owner.
enum class StepOrder {
  Locked,   // an owner runs one step at a time, of all optimizers with parameters there
  Hogwild,  // steps of different optimizers overlap (Niu et al., 2011)
};

// Options of DistributedOptimizer.
struct DistributedOptimizerOptions {
  // Whether an owner runs steps of several optimizers at once.
  StepOrder order = StepOrder::Locked;
  // If false, the constructor does not block: on each owner the optimizer's first call is queued
  // behind its creation, costs no further round trip, and throws the creation's error.
  bool wait_until_made = true;
};

namespace optim {

// On an owner: the optimizer itself, over tensors that share the parameters' memory and have
// gradients of their own.
class WEFT_API LocalOptimizer {
 public:
  LocalOptimizer(std::vector<RRef<at::Tensor>> parameters, StepOrder order);
  virtual ~LocalOptimizer() = default;
  // Steps with the context's gradients; parameters without one stay as they are. On GPUs the step
  // is enqueued on the current streams, behind earlier steps; the fence passes when it has run
  // there.
  Fence step(autograd::Context& context);
  void set_lr(double lr);
  double lr() const;
  // Called by an RPC on the owner; the call's streams wait for the previous step.
  std::string save() const;
  void load(std::string text);

 protected:
  const std::vector<at::Tensor>& stepped() const { return stepped_; }
  void own(std::unique_ptr<torch::optim::Optimizer> optimizer) {
    MutexLock lock(mutex_);
    optimizer_ = std::move(optimizer);
  }

 private:
  const StepOrder order_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> stepped_;
  mutable Mutex mutex_;
  Fence last_ WEFT_GUARDED_BY(mutex_);  // the previous step has run on the GPUs
  std::unique_ptr<torch::optim::Optimizer> optimizer_ WEFT_GUARDED_BY(mutex_);
};

template <class O, class Options>
class LocalOptimizerOf final : public LocalOptimizer {
 public:
  LocalOptimizerOf(std::vector<RRef<at::Tensor>> parameters, OptionsOnWire<Options> options,
                   StepOrder order)
      : LocalOptimizer(std::move(parameters), order) {
    own(std::make_unique<O>(stepped(), options.options()));
  }
};

// A driver's record of one owner's optimizer.
struct Owner {
  rpc::WorkerInfo worker;
  RRef<std::shared_ptr<LocalOptimizer>> optimizer;
};

template <class O, class Options>
WEFT_API std::shared_ptr<LocalOptimizer> make_local(std::vector<RRef<at::Tensor>> parameters,
                                                    OptionsOnWire<Options> options,
                                                    StepOrder order) {
  return std::make_shared<LocalOptimizerOf<O, Options>>(std::move(parameters), std::move(options),
                                                        order);
}

// The parameters of each owner, in the order in which the owners first appear.
WEFT_API std::vector<std::pair<rpc::WorkerInfo, std::vector<RRef<at::Tensor>>>> by_owner(
    const std::vector<RRef<at::Tensor>>& parameters);
// The parameters' agent. Throws Caller if there are no parameters.
WEFT_API rpc::Agent agent_of(const std::vector<RRef<at::Tensor>>& parameters);
// Blocks until all optimizers have been made.
WEFT_API void wait_for(const std::vector<Owner>& owners, const std::string& what);
WEFT_API Future<void> step(const std::vector<Owner>& owners, const AutogradContext& context);
WEFT_API void set_lr(const std::vector<Owner>& owners, double lr);
WEFT_API double lr(const std::vector<Owner>& owners);
WEFT_API std::vector<std::string> save(const std::vector<Owner>& owners);
WEFT_API void load(const std::vector<Owner>& owners, const std::vector<std::string>& states);

}  // namespace optim

namespace optim {

template <class O, class... Given>
constexpr bool kSteps = false;
template <class O, class Parameters, class Options>
constexpr bool kSteps<O, Parameters, Options> =
    std::is_convertible_v<Parameters, std::vector<RRef<at::Tensor>>>&&
        std::is_convertible_v<Options, const torch::optim::OptimizerOptions&>&&
            std::is_constructible_v<O, std::vector<at::Tensor>, Options>;
template <class O, class Parameters, class Options, class How>
constexpr bool kSteps<O, Parameters, Options, How> =
    kSteps<O, Parameters, Options>&& std::is_convertible_v<How, DistributedOptimizerOptions>;

}  // namespace optim

// O: an optimizer that is made of tensors and options, as libtorch's are. Thread-safe; copies refer
// to the same optimizer.
template <class O>
class DistributedOptimizer {
  static_assert(!std::derived_from<O, torch::optim::LBFGS>,
                "LBFGS computes the loss again and again within a step, which an owner of only "
                "some parameters cannot do; use Adam, AdamW, SGD, RMSprop, Adagrad");

 public:
  // `parameters` belong to one agent of this process; each is a leaf that requires grad. Blocks
  // until every owner has made its local optimizer, unless `how` says otherwise. If some fail,
  // throws one Error that names each owner and the error of its optimizer's constructor.
  template <class Options>
  requires(optim::kSteps<O, std::vector<RRef<at::Tensor>>, Options>)
      DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters, const Options& options,
                           const DistributedOptimizerOptions& how = {}) {
    const rpc::Agent agent = optim::agent_of(parameters);
    const optim::OptionsOnWire<Options> travelling{optim::saved(options)};
    for (const auto& [worker, owned] : optim::by_owner(parameters)) {
      owners_.push_back({worker, agent.remote<&optim::make_local<O, Options>>(
                                     worker, owned, travelling, how.order)});
    }
    if (how.wait_until_made) optim::wait_for(owners_, "making the optimizer");
  }

  // For Weft's own use: reports wrong arguments.
  template <class... Given>
  requires(sizeof...(Given) > 1 &&
           !optim::kSteps<O, Given...>) explicit DistributedOptimizer(const Given&...) {
    static_assert(weft::detail::kNever<Given...>,
                  "DistributedOptimizer takes RRefs to the parameters, "
                  "std::vector<RRef<at::Tensor>>, the options of its kind "
                  "of optimizer, such as torch::optim::SGDOptions(0.05), and perhaps "
                  "DistributedOptimizerOptions");
  }

  // Blocks until all owners have stepped. Throws one Error that lists the owners that failed; the
  // others have stepped.
  void step(const AutogradContext& context) const { step_async(context).get(); }
  // Steps after the passes that backward_async() of this worker has begun in the context and that
  // still run or, if they were the last, have failed. Owners to which this worker sends gradients
  // are asked at once, and step as soon as their own part of the passes has ended: pass and step
  // cost one round trip to them. Other owners are asked when the passes have ended. If a pass
  // fails, all owners that have not stepped by then fail too; the error names those that have
  // stepped. (After backward(), no owner steps if it has failed.)
  Future<void> step_async(const AutogradContext& context) const {
    return optim::step(owners_, context);
  }

  // Sets the learning rate of all parameters, on all owners.
  void set_lr(double lr) const { optim::set_lr(owners_, lr); }
  // The learning rate, from the first owner.
  double lr() const { return optim::lr(owners_); }

  // save() returns each optimizer's state, in libtorch's form, one for each owner in the order of
  // the parameters. load() replaces all state of an optimizer over the same parameters by it.
  std::vector<std::string> save() const { return optim::save(owners_); }
  // Loads the states that save() has returned.
  void load(const std::vector<std::string>& states) const { optim::load(owners_, states); }

 private:
  std::vector<optim::Owner> owners_;
};

}  // namespace weft
