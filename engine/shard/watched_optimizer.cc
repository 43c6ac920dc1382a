// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <typeinfo>
#include <utility>

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/shard/watched_optimizer.h>

namespace weft::shard {

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
      if (!probe_.defined())
        probe_ = at::zeros({1}, parameter.options().requires_grad(false)).set_requires_grad(true);
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
  const bool is_same = version() == seen_ && probe_.item<double>() == 0;
  if (is_same) return false;
  probe_.zero_();
  seen_ = version();
  return true;
}

bool WatchedOptimizer::has_cleared() {
  const at::Tensor& gradient = probe_.grad();
  if (gradient.defined() && static_cast<std::uint64_t>(gradient._version()) == armed_) return false;
  arm();
  return true;
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
  gradient = at::ones_like(probe_);
  armed_ = static_cast<std::uint64_t>(gradient._version());
}

}  // namespace weft::shard
