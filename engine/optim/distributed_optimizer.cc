#include <sstream>

#include <c10/core/GradMode.h>
#include <torch/serialize/archive.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/optim/distributed_optimizer.h>
#include <weft/engine/rpc/core.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::optim {

// What drivers call.
namespace internal {
using Shared = std::shared_ptr<LocalOptimizer>;
void step_one(Shared& optimizer, std::uint64_t context) { optimizer->step(context); }
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
    throw Error(Blame::Caller,
                std::string("this is not the saved ") + what + " of an optimizer: " + tensor::text_of(error));
  }
}

// One error for all: every owner that failed, and why.
class Failures {
 public:
  explicit Failures(std::string what) : what_(std::move(what)) {}
  void add(const rpc::WorkerInfo& worker, const std::exception_ptr& error) {
    const autograd::Outcome what = autograd::outcome_of(error);
    if (text_.empty()) blame_ = static_cast<Blame>(what.blame);
    text_ += (text_.empty() ? "" : "; ") + describe(worker) + ": " + what.text;
  }
  void require_none() const {
    if (!text_.empty()) throw Error(blame_, what_ + " failed on " + text_);
  }

 private:
  const std::string what_;
  std::string text_;
  Blame blame_ = Blame::Remote;
};

// Done when all have ended; fails with all that failed.
template <class T>
Future<void> all_of(const std::vector<Owner>& owners, std::string what, std::vector<Future<T>> asked) {
  struct Gathered {
    explicit Gathered(std::string what) : failures(std::move(what)) {}
    std::mutex mutex;
    Failures failures;
    std::size_t missing = 0;
  };
  auto gathered = std::make_shared<Gathered>(std::move(what));
  gathered->missing = asked.size();
  Promise<void> promise(asked.front().home());
  for (std::size_t i = 0; i < asked.size(); ++i) {
    asked[i].on_done_light([gathered, promise, worker = owners[i].worker](const Future<T>& one) {
      std::unique_lock lock(gathered->mutex);
      if (const auto error = one.error()) gathered->failures.add(worker, error);
      if (--gathered->missing > 0) return;
      lock.unlock();
      try {
        gathered->failures.require_none();
        promise.set();
      } catch (const Error&) {
        promise.set_error(std::current_exception());
      }
    });
  }
  return promise.future();
}

template <auto F, class... A>
auto ask(const std::vector<Owner>& owners, const A&... arguments) {
  // The users' context is none of the optimizers'.
  const weft::detail::AmbientScope outside(nullptr);
  std::vector<decltype(owners.front().optimizer.template async<F>(arguments...))> asked;
  for (const Owner& owner : owners) asked.push_back(owner.optimizer.template async<F>(arguments...));
  return asked;
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
  optimizer.load(archive);
}

LocalOptimizer::LocalOptimizer(std::vector<RRef<at::Tensor>> parameters, StepOrder order) : order_(order) {
  for (const auto& one : parameters) {
    const at::Tensor& parameter = one.local_value();
    if (!parameter.defined() || !parameter.requires_grad() || !parameter.is_leaf()) {
      throw Error(Blame::Caller, "a parameter of a DistributedOptimizer is no leaf that requires grad");
    }
    parameters_.push_back(parameter);
    stepped_.push_back(parameter.detach().requires_grad_());
  }
}

void LocalOptimizer::step(std::uint64_t id) {
  const auto core = rpc::current_call("step()").core();
  const auto context = core->contexts().find(id);
  if (!context) return;
  std::unique_lock<std::mutex> others;
  if (order_ == StepOrder::Locked) others = std::unique_lock(core->contexts().stepping());
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) stepped_[i].mutable_grad() = context->gradient(parameters_[i]);
  const auto forget = [this] {
    for (const at::Tensor& one : stepped_) one.mutable_grad() = at::Tensor();
  };
  try {
    optimizer_->step();
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

void LocalOptimizer::set_lr(double lr) {
  std::lock_guard lock(mutex_);
  optimizer_->defaults().set_lr(lr);
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
}

double LocalOptimizer::lr() const {
  std::lock_guard lock(mutex_);
  return optimizer_->param_groups().front().options().get_lr();
}

std::string LocalOptimizer::save() const {
  std::lock_guard lock(mutex_);
  return saved(*optimizer_);
}

void LocalOptimizer::load(std::string text) {
  std::lock_guard lock(mutex_);
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
  if (parameters.empty()) throw Error(Blame::Caller, "DistributedOptimizer: there are no parameters");
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
    throw Error(Blame::Caller, "step(): autograd context " + autograd::to_text(shared->id()) + " has been released");
  }
  const auto go = [owners, id = shared->id()] {
    return all_of(owners, "the optimizer's step", ask<&internal::step_one>(owners, id));
  };
  auto running = shared->running_here();
  if (running.empty()) return go();
  return when_all(std::move(running)).then(go);
}

void set_lr(const std::vector<Owner>& owners, double lr) {
  all_of(owners, "setting the learning rate", ask<&internal::set_lr_of>(owners, lr)).get();
}

double lr(const std::vector<Owner>& owners) { return owners.front().optimizer.sync<&internal::lr_of>(); }

std::vector<std::string> save(const std::vector<Owner>& owners) {
  const auto asked = ask<&internal::save_one>(owners);
  all_of(owners, "saving the optimizer", asked).get();
  std::vector<std::string> states;
  for (const auto& one : asked) states.push_back(one.get());
  return states;
}

void load(const std::vector<Owner>& owners, const std::vector<std::string>& states) {
  if (states.size() != owners.size()) {
    throw Error(Blame::Caller, "load(): " + std::to_string(states.size()) + " states for an optimizer on " +
                                   std::to_string(owners.size()) + " owners");
  }
  std::vector<Future<void>> asked;
  for (std::size_t i = 0; i < owners.size(); ++i)
    asked.push_back(owners[i].optimizer.async<&internal::load_one>(states[i]));
  all_of(owners, "loading the optimizer", std::move(asked)).get();
}

}  // namespace weft::optim
