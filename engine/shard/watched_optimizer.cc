// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <typeinfo>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/shard/watched_optimizer.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::shard {

namespace {

at::Tensor pair(const at::TensorOptions& options, double first, double second) {
  at::Tensor made = at::empty({2}, at::TensorOptions(options.dtype()));
  made[0] = first;
  made[1] = second;
  return made.to(options.device());
}

double first_of(const at::Tensor& tensor) { return tensor[0].item<double>(); }

}  // namespace

WatchedOptimizer::WatchedOptimizer(torch::optim::Optimizer& optimizer, const std::string& name,
                                   const ShardedModel& model)
    : optimizer_(optimizer) {
  const auto refuse = [&](const std::string& why) { throw Error(Blame::Caller, name + why); };
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr)
    refuse(
        " is LBFGS, which computes the loss again in each step; a rank that has run out has none. "
        "Use another optimizer");
  if (dynamic_cast<Joinable*>(&optimizer) != nullptr)
    refuse(
        " divides its state over the ranks itself, and a sharded model has its own rows only; use "
        "the plain optimizer");
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      Owner owner = owner_of(parameter);
      if (!owner.unit || owner.unit->model.lock().get() != &model)
        refuse(
            " has a parameter that is no shard of this model, so a rank that has run out would "
            "step it without a gradient; make the optimizer after sharding, of "
            "model->parameters() alone");
      parameters_.push_back({std::move(owner.unit), owner.parameter});
      if (!probe_.defined()) probe_ = pair(parameter.options(), 0, 1).set_requires_grad(true);
    }
  }
  if (parameters_.empty()) refuse(" has no parameters");
  arm();
  if (dynamic_cast<torch::optim::Adagrad*>(&optimizer) != nullptr) {  // whose constructor makes it
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->sum(at::zeros_like(probe_));
    optimizer_.state()[probe_.unsafeGetTensorImpl()] = std::move(state);
  }
  seen_ = version();
  optimizer_.param_groups().front().params().push_back(probe_);
}

WatchedOptimizer::~WatchedOptimizer() {
  std::erase_if(optimizer_.param_groups().front().params(),
                [&](const at::Tensor& parameter) { return parameter.is_same(probe_); });
  optimizer_.state().erase(probe_.unsafeGetTensorImpl());
}

std::string WatchedOptimizer::description() const {
  std::string text = std::string(typeid(optimizer_).name()) + ":";
  for (const auto& group : optimizer_.param_groups())
    text += " " + std::to_string(group.params().size());
  for (const Parameter& parameter : parameters_)
    text += "\n" + parameter.unit->parameters()[parameter.place].name;
  return text + "\n";
}

std::vector<double> WatchedOptimizer::rates() const {
  std::vector<double> rates;
  for (const auto& group : optimizer_.param_groups()) {
    try {
      rates.push_back(group.options().get_lr());
    } catch (const c10::Error&) {  // a program's own options without one
      rates.push_back(std::numeric_limits<double>::quiet_NaN());
    }
  }
  return rates;
}

// Some optimizers write without a trace in the version, but not without one in the value.
bool WatchedOptimizer::has_stepped() {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor values = probe_.detach().to(at::kCPU, at::kDouble);
  const bool is_same = version() == seen_ && first_of(values) == 0 && values[1].item<double>() == 1;
  if (is_same) return false;
  has_seen_gradients_ = saw_gradient();
  forget_step();
  seen_ = version();
  return true;
}

// The first value and its state were zero before the step. A learning rate of 0 leaves the value.
bool WatchedOptimizer::saw_gradient() const {
  const auto is_set = [](const at::Tensor& tensor) {
    return tensor.defined() && first_of(tensor) != 0;
  };
  if (is_set(probe_)) return true;
  const auto found = optimizer_.state().find(probe_.unsafeGetTensorImpl());
  if (found == optimizer_.state().end()) return false;
  const auto* const state = found->second.get();
  if (const auto* const sgd = dynamic_cast<const torch::optim::SGDParamState*>(state))
    return is_set(sgd->momentum_buffer());
  if (const auto* const adam = dynamic_cast<const torch::optim::AdamParamState*>(state))
    return is_set(adam->exp_avg());
  if (const auto* const adamw = dynamic_cast<const torch::optim::AdamWParamState*>(state))
    return is_set(adamw->exp_avg());
  if (const auto* const rms = dynamic_cast<const torch::optim::RMSpropParamState*>(state))
    return is_set(rms->square_avg());
  const auto* const adagrad = dynamic_cast<const torch::optim::AdagradParamState*>(state);
  return adagrad != nullptr && is_set(adagrad->sum());
}

void WatchedOptimizer::forget_step() {
  probe_.copy_(pair(probe_.options(), 0, 1));
  const auto found = optimizer_.state().find(probe_.unsafeGetTensorImpl());
  if (found == optimizer_.state().end()) return;
  if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(found->second.get())) {
    adagrad->sum().zero_();
  } else {
    optimizer_.state().erase(found);
  }
}

bool WatchedOptimizer::has_cleared() {
  const at::Tensor& gradient = probe_.grad();
  if (gradient.defined() && static_cast<std::uint64_t>(gradient._version()) == armed_) return false;
  arm();
  return true;
}

void WatchedOptimizer::zero_gradients() const {
  for (const Parameter& parameter : parameters_) {
    at::Tensor& gradient = parameter.unit->shards()[parameter.place].mutable_grad();
    if (gradient.defined() && !is_stand_in(gradient)) gradient = at::zeros_like(gradient);
  }
}

void WatchedOptimizer::step(const std::vector<double>& rates) {
  for (std::size_t i = 0; i < rates.size() && i < optimizer_.param_groups().size(); ++i) {
    const bool has_one = rates[i] == rates[i];
    if (has_one) optimizer_.param_groups()[i].options().set_lr(rates[i]);
  }
  optimizer_.step();
}

// Changes with a step of SGD with momentum and a learning rate of 0, too, which changes its state.
std::uint64_t WatchedOptimizer::version() const {
  const auto own = static_cast<std::uint64_t>(probe_._version());
  const auto found = optimizer_.state().find(probe_.unsafeGetTensorImpl());
  if (found == optimizer_.state().end()) return own;
  const auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(found->second.get());
  const bool has_momentum = sgd != nullptr && sgd->momentum_buffer().defined();
  return own + 1 +
         (has_momentum ? static_cast<std::uint64_t>(sgd->momentum_buffer()._version()) : 0);
}

void WatchedOptimizer::arm() {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& gradient = probe_.mutable_grad();
  gradient = pair(probe_.options(), 1, 0);
  armed_ = static_cast<std::uint64_t>(gradient._version());
}

}  // namespace weft::shard
