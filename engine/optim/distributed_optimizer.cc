// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <sstream>

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/serialize/archive.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/call/core.h>
#include <weft/engine/future/when_all.h>
#include <weft/engine/optim/distributed_optimizer.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/trace.h>

namespace weft::optim {

namespace traced {
namespace {
constinit trace::Name step{trace::Layer::Engine, "optimizer step"};
}  // namespace
}  // namespace traced

// Functions that drivers call on owners.
namespace internal {
using Shared = std::shared_ptr<LocalOptimizer>;
constexpr std::size_t kMostPasses = 256;
// Steps for another worker, whose next call may run here on any streams; so the future is done only
// when the GPUs have finished.
Future<void> step_for_another(const std::shared_ptr<call::AgentCore>& core, const Shared& optimizer,
                              autograd::Context& context) {
  const Fence has_run = optimizer->step(context);
  const Promise<void> stepped(core->thread_pool());
  if (has_run.query()) {
    stepped.set();
  } else {
    core->loop()->when(has_run, Task([stepped] { stepped.set(); }));
  }
  return stepped.future();
}
// Steps with a context. Does nothing if this worker does not know the context: no pass has come
// here. `failed`: failed passes of which this worker may not have heard.
Future<void> step_one(Shared& optimizer, std::uint64_t id, std::vector<autograd::PassId> failed) {
  const call::CallExecutionContext& here = call::current_call("step()");
  const auto core = here.core();
  if (const auto context = autograd::contexts_of(*core).find(id)) {
    autograd::messages::hear_failed(core, context, failed);
    if (here.call().caller != core->self()) return step_for_another(core, optimizer, *context);
    optimizer->step(*context);  // on streams of the caller, which wait for it
    return Future<void>::ready();
  }
  if (!autograd::contexts_of(*core).has_ended(id)) return Future<void>::ready();
  throw Error(Blame::Cancelled, describe(core->self()) + " has released autograd context " +
                                    autograd::to_text(id) +
                                    ", and its gradients with it: it has not stepped");
}
// Steps when the passes have ended without error here. The caller takes part in these passes, and
// has sent gradients of each to this worker.
Future<void> step_behind(Shared& optimizer, std::uint64_t id,
                         std::vector<autograd::PassName> passes) {
  const call::CallExecutionContext& here = call::current_call("step()");
  const auto core = here.core();
  const auto context = autograd::contexts_of(*core).find(id);
  if (!context) {
    throw Error(Blame::Cancelled,
                describe(core->self()) + " has released autograd context " + autograd::to_text(id));
  }
  if (passes.size() > kMostPasses)
    throw Error(Blame::Caller, "a step behind " + std::to_string(passes.size()) + " passes");
  std::vector<Future<void>> ended;
  for (autograd::PassName& name : passes) {
    name.context = id;
    autograd::messages::hear_failed(core, context, name.failed);
    const auto joined = context->passes().join(core, name, here.call().deadline);
    const auto outcome = joined.pass
                             ? joined.pass->ending().outcome()
                             : Future<autograd::Outcome>::ready(autograd::Outcome(joined.outcome));
    ended.push_back(outcome.then([](const autograd::Outcome& how) {
      if (how.failed()) throw Error(Blame::Cancelled, "it has not stepped: " + how.text);
    }));
  }
  // Runs on another thread: the thread that ends the pass has other workers to tell.
  return when_all(std::move(ended)).then([core, context, optimizer] {
    Promise<void> stepped(core->thread_pool());
    core->thread_pool()->run(Task([core, context, optimizer, stepped] {
      const trace::Range range(traced::step, {.rank = core->self().rank});
      const trace::ServeScope counted;
      try {
        const c10::MultiStreamGuard streams(
            tensor::CudaDevices::pool_streams(core->devices().gpus()));
        step_for_another(core, optimizer, *context).forward_to(stepped);
      } catch (...) {
        stepped.set_error(std::current_exception());
      }
    }));
    return stepped.future();
  });
}
void set_lr_of(Shared& optimizer, double lr) { optimizer->set_lr(lr); }
double lr_of(Shared& optimizer) { return optimizer->lr(); }
std::string save_one(Shared& optimizer) { return optimizer->save(); }
void load_one(Shared& optimizer, std::string text) { optimizer->load(std::move(text)); }

}  // namespace internal

namespace {

template <class T>
std::string text_of(const T& saved) {
  torch::serialize::OutputArchive archive;
  if constexpr (std::is_base_of_v<torch::optim::OptimizerOptions, T>) {
    saved.serialize(archive);
  } else {
    saved.save(archive);
  }
  std::ostringstream text;
  archive.save_to(text);
  return text.str();
}

torch::serialize::InputArchive archive_of(const std::string& text, const char* what) {
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(text.data(), text.size());
    return archive;
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, std::string("this is not the saved ") + what +
                                   " of an optimizer: " + tensor::text_of(error));
  }
}

// Collects one error for all owners that failed.
class Failures {
 public:
  explicit Failures(std::string what) : what_(std::move(what)) {}
  void add(const rpc::WorkerInfo& worker, const std::exception_ptr& error) {
    const autograd::Outcome what = autograd::outcome_of(error);
    if (text_.empty()) blame_ = static_cast<Blame>(what.blame);
    ranks_.insert(ranks_.end(), what.ranks.begin(), what.ranks.end());
    text_ += (text_.empty() ? "" : "; ") + describe(worker) + ": " + what.text;
  }
  void require_none() const {
    if (!text_.empty()) throw Error(blame_, what_ + " failed on " + text_).with_ranks(ranks_);
  }

 private:
  const std::string what_;
  std::string text_;
  Blame blame_ = Blame::Remote;
  std::vector<int> ranks_;
};

// Returns a future that is done when all have ended, and that fails if any has failed.
template <class T>
Future<void> all_of(const std::vector<Owner>& owners, std::string what,
                    std::vector<Future<T>> asked) {
  struct Gathered {
    Gathered(std::string what, std::size_t count) : failures(std::move(what)), missing(count) {}
    Mutex mutex;
    Failures failures WEFT_GUARDED_BY(mutex);
    std::vector<weft::detail::DeviceWorkRef> works WEFT_GUARDED_BY(mutex);  // this worker's own
    std::size_t missing WEFT_GUARDED_BY(mutex);
  };
  auto gathered = std::make_shared<Gathered>(std::move(what), asked.size());
  Promise<void> promise(weft::detail::executor_of(asked));
  for (std::size_t i = 0; i < asked.size(); ++i) {
    asked[i].on_done_light([gathered, promise, worker = owners[i].worker](const Future<T>& one) {
      UniqueLock lock(gathered->mutex);
      if (const auto error = one.error()) gathered->failures.add(worker, error);
      gathered->works.push_back(one.device_work());
      if (--gathered->missing > 0) return;
      const Failures failures = std::move(gathered->failures);
      auto works = std::move(gathered->works);
      lock.unlock();
      try {
        failures.require_none();
        promise.set_with(weft::detail::join(std::move(works)), {});
      } catch (const Error&) {
        promise.set_error(std::current_exception());
      }
    });
  }
  return promise.future();
}

// Turns an exception of `ask` into a failed future, so that the other owners are asked all the
// same.
template <class F>
auto attempt(const F& ask) -> decltype(ask()) {
  try {
    return ask();
  } catch (...) {
    return decltype(ask())::failed(std::current_exception());
  }
}

template <auto F, class... A>
auto ask(const std::vector<Owner>& owners, const A&... arguments) {
  // The user's execution context does not apply to these calls.
  const weft::detail::ExecutionContextScope outside(nullptr);
  std::vector<decltype(owners.front().optimizer.template async<F>(arguments...))> asked;
  for (const Owner& owner : owners) {
    asked.push_back(attempt([&] { return owner.optimizer.template async<F>(arguments...); }));
  }
  return asked;
}

// If set_data() or module->to() has given the parameter other memory, makes the optimizer's tensor
// share that from now on.
void follow(const at::Tensor& parameter, const at::Tensor& stepped, std::size_t place,
            std::size_t all) {
  if (parameter.scalar_type() != stepped.scalar_type() || parameter.device() != stepped.device() ||
      parameter.sizes() != stepped.sizes()) {
    throw Error(
        Blame::Caller,
        "parameter " + std::to_string(place) + " of " + std::to_string(all) + " here is " +
            tensor::describe(parameter) + ", and was " + tensor::describe(stepped) +
            " when the optimizer was made; call module->to(…) first, then make the optimizer");
  }
  if (!parameter.has_storage()) return;  // sparse
  const bool shares_memory = parameter.is_alias_of(stepped) &&
                             parameter.storage_offset() == stepped.storage_offset() &&
                             parameter.strides() == stepped.strides();
  if (!shares_memory) stepped.set_data(parameter.detach());
}

// Makes the streams of this call wait for the last step, before the call reads or replaces its
// results.
void wait_here(const Fence& step, const char* what) {
  const auto core = call::current_call(what).core();
  for (const c10::Stream& stream : tensor::CudaDevices::current_streams(core->devices().gpus()))
    core->devices().cuda().wait(step, stream);
}

constexpr const char* kStep = "the optimizer's step";
using Passes = std::vector<std::shared_ptr<autograd::Pass>>;

// Asks each owner to step: behind the passes, if the owner is known to take part in them; otherwise
// once they have ended everywhere.
std::vector<Future<void>> ask_behind(const std::vector<Owner>& owners,
                                     const std::shared_ptr<autograd::Context>& context,
                                     const Passes& passes, const Future<void>& ended) {
  const weft::detail::ExecutionContextScope outside(nullptr);
  std::vector<autograd::PassName> names;
  for (const auto& pass : passes) names.push_back(pass->name());
  std::vector<Future<void>> asked;
  for (const Owner& owner : owners) {
    const bool takes_part =
        names.size() <= internal::kMostPasses && std::ranges::all_of(passes, [&](const auto& pass) {
          return pass->sent().reached(owner.worker.rank);
        });
    asked.push_back(takes_part ? attempt([&] {
      return owner.optimizer.async<&internal::step_behind>(context->id(), names);
    })
                               : ended.then([=](const Future<void>& how) {
                                   if (how.failed())
                                     throw Error(Blame::Cancelled, "it has not been asked to step");
                                   const weft::detail::ExecutionContextScope still_outside(nullptr);
                                   return owner.optimizer.async<&internal::step_one>(
                                       context->id(), context->failed_passes().untold());
                                 }));
  }
  return asked;
}

// Calls `call` when all futures are done, on the thread that completes the last one: it must
// neither block nor throw.
void when_ended(const std::vector<Future<void>>& all, const std::function<void()>& call) {
  const auto missing = std::make_shared<std::atomic<std::size_t>>(all.size());
  for (const auto& one : all) {
    one.on_done_light([missing, call](const Future<void>&) {
      if (--*missing == 0) call();
    });
  }
}

// If a pass has failed, returns its error, with the owners that stepped before they heard of it and
// those that do not answer.
std::optional<Error> failed_behind(const std::vector<Owner>& owners,
                                   const std::vector<Future<void>>& asked,
                                   const std::vector<Future<void>>& passes) {
  const auto broken =
      std::ranges::find_if(passes, [](const Future<void>& pass) { return pass.failed(); });
  if (broken == passes.end()) return std::nullopt;
  autograd::Outcome what = autograd::outcome_of(broken->error());
  std::string stepped, silent;
  for (std::size_t i = 0; i < owners.size(); ++i) {
    const auto error = asked[i].error();
    const int blame = error ? autograd::outcome_of(error).blame : -1;
    const bool is_silent =
        blame == static_cast<int>(Blame::Timeout) || blame == static_cast<int>(Blame::PeerLost);
    if (error && !is_silent) continue;
    std::string& list = error ? silent : stepped;
    list += (list.empty() ? "" : ", ") + describe(owners[i].worker);
  }
  if (!stepped.empty()) what.text += "; workers that stepped before they heard of it: " + stepped;
  if (!silent.empty()) what.text += "; workers that do not answer and may have stepped: " + silent;
  return Error(static_cast<Blame>(what.blame), std::string(kStep) + ": " + what.text)
      .with_ranks(what.ranks);
}

// Returns a future that is done when all owners have answered and the passes have ended.
Future<void> judged(const std::vector<Owner>& owners, const std::vector<Future<void>>& asked,
                    const std::vector<Future<void>>& passes) {
  const auto answered = all_of(owners, kStep, asked);
  const Promise<void> promise(answered.executor());
  std::vector<Future<void>> all = passes;
  all.push_back(answered);
  when_ended(all, [=] {
    try {
      const auto failure = failed_behind(owners, asked, passes);
      failure ? promise.set_error(*failure) : answered.forward_to(promise);
    } catch (...) {
      promise.set_error(std::current_exception());
    }
  });
  return promise.future();
}

}  // namespace

std::string saved(const torch::optim::OptimizerOptions& options) { return text_of(options); }
std::string saved(const torch::optim::Optimizer& optimizer) { return text_of(optimizer); }

void load(torch::optim::OptimizerOptions& options, const std::string& text) {
  auto archive = archive_of(text, "options");
  options.serialize(archive);
}

void load(torch::optim::Optimizer& optimizer, const std::string& text) {
  auto archive = archive_of(text, "state");
  // libtorch adds the saved state but keeps the present state of parameters for which none was
  // saved.
  std::remove_reference_t<decltype(optimizer.state())> before;
  before.swap(optimizer.state());
  try {
    optimizer.load(archive);
  } catch (...) {
    before.swap(optimizer.state());
    throw;
  }
}

LocalOptimizer::LocalOptimizer(std::vector<RRef<at::Tensor>> parameters, StepOrder order)
    : order_(order) {
  for (const auto& one : parameters) {
    const at::Tensor& parameter = one.local_value();
    const auto refuse = [&](const std::string& why) {
      throw Error(Blame::Caller, "parameter " + std::to_string(parameters_.size()) + " of " +
                                     std::to_string(parameters.size()) + " here, " +
                                     tensor::describe(parameter) + ", " + why);
    };
    if (!parameter.defined()) refuse("cannot be stepped: give a tensor that has been made");
    if (!parameter.requires_grad())
      refuse("does not require grad: call requires_grad_() where it is made");
    if (!parameter.is_leaf())
      refuse(
          "is not a leaf: give the leaf that it was computed from, or detach() it and call "
          "requires_grad_()");
    // The optimizer gets a new tensor for each parameter, so it would not notice duplicates.
    if (std::ranges::any_of(parameters_,
                            [&](const at::Tensor& known) { return known.is_same(parameter); })) {
      throw Error(Blame::Caller, "a parameter of a DistributedOptimizer, " +
                                     tensor::describe(parameter) + ", is given twice");
    }
    parameters_.push_back(parameter);
    stepped_.push_back(parameter.detach().requires_grad_());
  }
}

Fence LocalOptimizer::step(autograd::Context& context) {
  const auto core = context.core();
  autograd::Contexts::Steps& steps = autograd::contexts_of(*core).steps();
  std::unique_lock<std::mutex> others;
  if (order_ == StepOrder::Locked) others = std::unique_lock<std::mutex>(steps.mutex);
  MutexLock lock(mutex_);
  // Each call that steps runs on streams of its own.
  const auto streams = tensor::CudaDevices::current_streams(core->devices().gpus());
  Fence& last = order_ == StepOrder::Locked ? steps.last : last_;
  for (const c10::Stream& stream : streams) core->devices().cuda().wait(last, stream);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    follow(parameters_[i], stepped_[i], i, parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    stepped_[i].mutable_grad() = context.passes().gradient(parameters_[i]);
  }
  const auto end = [&]() WEFT_REQUIRES(mutex_) {
    for (const at::Tensor& one : stepped_) one.mutable_grad() = at::Tensor();
    last = last_ = core->devices().cuda().recorded(streams);
  };
  autograd::contexts_of(*core).steps_in(context.id());
  try {
    optimizer_->step();
  } catch (...) {
    end();
    throw;
  }
  end();
  return last;
}

void LocalOptimizer::set_lr(double lr) {
  MutexLock lock(mutex_);
  optimizer_->defaults().set_lr(lr);
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
}

double LocalOptimizer::lr() const {
  MutexLock lock(mutex_);
  return optimizer_->param_groups().front().options().get_lr();
}

std::string LocalOptimizer::save() const {
  MutexLock lock(mutex_);
  wait_here(last_, "save()");
  return saved(*optimizer_);
}

void LocalOptimizer::load(std::string text) {
  MutexLock lock(mutex_);
  wait_here(last_, "load()");
  optim::load(*optimizer_, text);
}

std::vector<std::pair<rpc::WorkerInfo, std::vector<RRef<at::Tensor>>>> by_owner(
    const std::vector<RRef<at::Tensor>>& parameters) {
  std::vector<std::pair<rpc::WorkerInfo, std::vector<RRef<at::Tensor>>>> owners;
  for (const auto& parameter : parameters) {
    auto found = owners.begin();
    while (found != owners.end() && found->first != parameter.owner()) ++found;
    if (found == owners.end()) found = owners.insert(owners.end(), {parameter.owner(), {}});
    found->second.push_back(parameter);
  }
  return owners;
}

rpc::Agent agent_of(const std::vector<RRef<at::Tensor>>& parameters) {
  if (parameters.empty())
    throw Error(Blame::Caller, "DistributedOptimizer: there are no parameters");
  return rpc::Agent(parameters.front().usable(), /*leaves_when_dropped=*/false);
}

void wait_for(const std::vector<Owner>& owners, const std::string& what) {
  std::vector<Future<void>> made;
  for (const Owner& owner : owners) made.push_back(owner.optimizer.created());
  all_of(owners, what, std::move(made)).get();
}

Future<void> step(const std::vector<Owner>& owners, const AutogradContext& context) {
  const auto& shared = context.shared();
  if (shared->released()) {
    throw Error(Blame::Caller, "step(): autograd context " + autograd::to_text(shared->id()) +
                                   " has been released, and its gradients with it: step first");
  }
  const auto running = shared->passes().running_here();
  if (running.empty())
    return all_of(owners, kStep,
                  ask<&internal::step_one>(owners, shared->id(), shared->failed_passes().untold()));
  Passes passes;
  std::vector<Future<void>> started, ended;
  for (const auto& one : running) {
    passes.push_back(one.pass);
    started.push_back(one.pass->started());
    ended.push_back(one.ended);
  }
  return when_all(std::move(started)).then([owners, shared, passes, ended] {
    return judged(owners, ask_behind(owners, shared, passes, when_all(ended)), ended);
  });
}

void set_lr(const std::vector<Owner>& owners, double lr) {
  all_of(owners, "setting the learning rate", ask<&internal::set_lr_of>(owners, lr)).get();
}

double lr(const std::vector<Owner>& owners) {
  const weft::detail::ExecutionContextScope outside(nullptr);
  return owners.front().optimizer.sync<&internal::lr_of>();
}

std::vector<std::string> save(const std::vector<Owner>& owners) {
  const auto asked = ask<&internal::save_one>(owners);
  all_of(owners, "saving the optimizer", asked).get();
  std::vector<std::string> states;
  for (const auto& one : asked) states.push_back(one.get());
  return states;
}

void load(const std::vector<Owner>& owners, const std::vector<std::string>& states) {
  if (states.size() != owners.size()) {
    std::string names;
    for (const Owner& owner : owners) names += (names.empty() ? "" : ", ") + describe(owner.worker);
    throw Error(
        Blame::Caller,
        "load(): " + std::to_string(states.size()) + " states, but the parameters have " +
            std::to_string(owners.size()) + " owners: " + names +
            "; give all states that save() returned for an optimizer over the same parameters");
  }
  const weft::detail::ExecutionContextScope outside(nullptr);
  std::vector<Future<void>> asked;
  for (std::size_t i = 0; i < owners.size(); ++i) {
    asked.push_back(
        attempt([&] { return owners[i].optimizer.async<&internal::load_one>(states[i]); }));
  }
  all_of(owners, "loading the optimizer", std::move(asked)).get();
}

}  // namespace weft::optim
