// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <typeinfo>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/shard/joined_steps.h>

namespace weft::shard {

namespace {

constexpr int kTag = 31007;  // of messages between ranks
enum Kind : std::int64_t { kGather, kReduce, kClear, kClip, kStep, kEnd };

constinit Clip mirrored_clip = nullptr;

bool has_bit(const std::int64_t* words, std::size_t bit) {
  return (static_cast<std::uint64_t>(words[bit / 64]) >> (bit % 64) & 1) != 0;
}

void set_bit(std::int64_t* words, std::size_t bit) {
  words[bit / 64] = static_cast<std::int64_t>(static_cast<std::uint64_t>(words[bit / 64]) |
                                              std::uint64_t{1} << (bit % 64));
}

// NaN for options without a learning rate.
double rate_of(const torch::optim::OptimizerParamGroup& group) {
  try {
    return group.options().get_lr();
  } catch (const c10::Error&) {
    return std::numeric_limits<double>::quiet_NaN();
  }
}

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(rate_of(group));
  return rates;
}

// Changes with each step that changes nothing but the optimizer's state: SGD with a learning rate
// of 0.
std::uint64_t version_of_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return 0;
  const auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(found->second.get());
  const bool has_momentum = sgd != nullptr && sgd->momentum_buffer().defined();
  return 1 + (has_momentum ? static_cast<std::uint64_t>(sgd->momentum_buffer()._version()) : 0);
}

}  // namespace

void set_mirrored_clip(Clip clip) { mirrored_clip = clip; }

JoinedSteps::JoinedSteps(std::shared_ptr<torch::nn::Module> module,
                         std::shared_ptr<ShardedModel> model, ProcessGroup group,
                         const std::vector<torch::optim::Optimizer*>& optimizers)
    : module_(std::move(module)), model_(std::move(model)), group_(std::move(group)) {
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    if (optimizers[i] == nullptr)
      throw Error(Blame::Caller, "join: one of the optimizers is a null pointer");
    optimizers_.push_back(joined(*optimizers[i], i));  // or throws
    doubles_ = std::max(doubles_, optimizers[i]->param_groups().size());
  }
  for (Joined& joined : optimizers_) {
    joined.optimizer->param_groups().front().params().push_back(joined.probe);
    arm(joined);
    has_stepped(joined);
  }
  MutexLock lock(model_->mutex_);
  for (const auto& unit : model_->units_) {
    words_ = std::max(words_, (unit->parameters().size() + 63) / 64);
    since_.emplace_back(unit->parameters().size());
  }
  model_->joined_ = this;
}

JoinedSteps::~JoinedSteps() {
  for (const Joined& joined : optimizers_) {
    std::erase_if(joined.optimizer->param_groups().front().params(),
                  [&](const at::Tensor& parameter) { return parameter.is_same(joined.probe); });
    joined.optimizer->state().erase(joined.probe.unsafeGetTensorImpl());
  }
  MutexLock lock(model_->mutex_);
  model_->joined_ = nullptr;
}

JoinedSteps::Joined JoinedSteps::joined(torch::optim::Optimizer& optimizer,
                                        std::size_t number) const {
  const std::string which = "join: optimizer " + std::to_string(number);
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw Error(Blame::Caller, which +
                                   " is LBFGS, which computes the loss again in each step; a "
                                   "rank that has run out has none. Use another optimizer");
  }
  if (dynamic_cast<Joinable*>(&optimizer) != nullptr) {
    throw Error(Blame::Caller, which +
                                   " divides its state over the ranks itself, and a sharded "
                                   "model has its own rows only; use the plain optimizer");
  }
  Joined joined{.optimizer = &optimizer, .parameters = {}, .rates = rates_of(optimizer)};
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      Owner owner = owner_of(parameter);
      if (!owner.unit || owner.unit->model.lock() != model_) {
        throw Error(Blame::Caller,
                    which +
                        " has a parameter that is no shard of this model, so a rank that has "
                        "run out would step it without a gradient; make the optimizer after "
                        "sharding, of model->parameters() alone");
      }
      joined.parameters.push_back({std::move(owner.unit), owner.parameter});
    }
  }
  if (joined.parameters.empty()) throw Error(Blame::Caller, which + " has no parameters");
  const at::Tensor& like = optimizer.param_groups().front().params().front();
  joined.probe = at::zeros({1}, like.options().requires_grad(false)).set_requires_grad(true);
  return joined;
}

void JoinedSteps::arm(Joined& joined) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor& gradient = joined.probe.mutable_grad();
  gradient = at::ones_like(joined.probe);
  joined.armed = static_cast<std::uint64_t>(gradient._version());
}

// Some optimizers write without a trace in the version, but not without one in the value.
bool JoinedSteps::has_stepped(Joined& joined) {
  const c10::AutoGradMode no_grad(false);
  const std::uint64_t version = static_cast<std::uint64_t>(joined.probe._version()) +
                                version_of_state(*joined.optimizer, joined.probe);
  const double value = joined.probe.item<double>();
  const bool is_same = version == joined.seen && value == joined.value;
  joined.seen = version;
  joined.value = value;
  return !is_same;
}

// zero_grad() either drops gradients or writes zeros to them.
void JoinedSteps::note_cleared() {
  for (Joined& joined : optimizers_) {
    const at::Tensor& gradient = joined.probe.grad();
    if (gradient.defined() && static_cast<std::uint64_t>(gradient._version()) == joined.armed)
      continue;
    for (const Parameter& parameter : joined.parameters)
      since_[parameter.unit->index][parameter.place].cleared = true;
    arm(joined);
  }
}

std::string JoinedSteps::description() const {
  std::string text;
  for (const Joined& joined : optimizers_) {
    text += std::string(typeid(*joined.optimizer).name()) + ":";
    for (const auto& group : joined.optimizer->param_groups())
      text += " " + std::to_string(group.params().size());
    for (const Parameter& parameter : joined.parameters)
      text += "\n" + parameter.unit->parameters()[parameter.place].name;
    text += "\n";
  }
  return text;
}

bool JoinedSteps::is_cleared(const Unit& unit, std::size_t parameter,
                             const at::Tensor& shard) const {
  const Since& since = since_[unit.index][parameter];
  const at::Tensor& gradient = shard.grad();
  if (!gradient.defined() || since.cleared) return true;
  // The module's zero_grad() may write zeros, too, which the probe does not show.
  return since.stepped && !told_.empty() && gradient.count_nonzero().item<std::int64_t>() == 0;
}

// Also of units that this step does not use, which an optimizer leaves alone then.
void JoinedSteps::tell_cleared() const {
  for (const auto& unit : model_->units_) {
    Message clear = message(kClear, unit->index);
    bool is_any = false;
    const std::vector<at::Tensor> shards = unit->shards();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (!is_cleared(*unit, i, shards[i])) continue;
      set_bit(clear.data() + 2, i);
      is_any = true;
    }
    if (is_any) tell(clear);
  }
}

void JoinedSteps::begin_step(const std::vector<bool>& active) {
  told_.clear();
  const auto first = std::ranges::find(active, true) - active.begin();
  for (std::size_t rank = 0; first == group_.rank() && rank < active.size(); ++rank) {
    if (!active[rank]) told_.push_back(static_cast<int>(rank));
  }
  reduces_first_ = !told_.empty();
}

void JoinedSteps::end_step() {
  for (std::size_t i = 0; i < optimizers_.size(); ++i) {
    if (!has_stepped(optimizers_[i])) continue;
    for (const Parameter& parameter : optimizers_[i].parameters)
      since_[parameter.unit->index][parameter.place].stepped = true;
    Message step = message(kStep, i);
    const std::vector<double>& rates = optimizers_[i].rates;
    std::memcpy(doubles(step), rates.data(), rates.size() * sizeof(double));
    tell(step);
  }
  tell(message(kEnd));
  told_.clear();
}

void JoinedSteps::gathers(const Unit& unit) { tell(message(kGather, unit.index)); }

void JoinedSteps::reduces(const Unit& unit, const std::vector<std::size_t>& parameters) {
  note_cleared();
  if (std::exchange(reduces_first_, false)) tell_cleared();
  Message reduce = message(kReduce, unit.index);
  const std::vector<at::Tensor> shards = unit.shards();
  for (const std::size_t i : parameters) {
    set_bit(reduce.data() + 2, i);
    if (is_cleared(unit, i, shards[i])) set_bit(reduce.data() + 2 + words_, i);
    since_[unit.index][i] = {};
  }
  for (Joined& joined : optimizers_) joined.rates = rates_of(*joined.optimizer);
  tell(reduce);
}

void before_clip(const torch::nn::Module& model, double max_norm, double norm_type, bool is_over) {
  if (parallel::detail::JoinScope::is_on_this_thread())
    JoinedSteps::clips(model, max_norm, norm_type, is_over);
}

void JoinedSteps::clips(const torch::nn::Module& model, double max_norm, double norm_type,
                        bool is_over) {
  std::shared_ptr<ShardedModel> sharded;
  for (const at::Tensor& parameter : model.parameters()) {
    if (const Owner owner = owner_of(parameter); owner.unit && !sharded)
      sharded = owner.unit->model.lock();
  }
  if (!sharded) return;
  MutexLock lock(sharded->mutex_);
  const JoinedSteps* const joined = sharded->joined_;
  if (joined == nullptr) return;
  if (&model != joined->module_.get() || is_over) {
    throw Error(Blame::Caller,
                "clip_grad_norm_ inside of a join of a sharded model: ranks that have run out can "
                "clip the whole model only; pass the module that its FullyShardedDataParallel "
                "wraps, and no group");
  }
  Message clip = joined->message(kClip);
  const double both[] = {max_norm, norm_type};
  std::memcpy(joined->doubles(clip), both, sizeof(both));
  joined->tell(clip);
}

void JoinedSteps::mirror_step(int leader, int divisor) {
  const c10::AutoGradMode no_grad(false);
  {
    MutexLock lock(model_->mutex_);
    model_->kept_.assign(model_->units_.size(), false);
    model_->present_.clear();
    model_->free_unless({});
    for (const auto& unit : model_->units_) unit->divisor = divisor;
  }
  const at::Tensor received =
      at::empty({static_cast<std::int64_t>(message(kEnd).size())},
                at::TensorOptions(at::kLong).device(group::host_values_device(group_)));
  const group::CalledBy by("join");
  ProcessGroup group = group_;
  for (;;) {
    group.recv(received, leader, kTag).wait();
    const at::Tensor here = received.to(at::kCPU);
    const auto* const numbers = here.const_data_ptr<std::int64_t>();
    Message told(numbers, numbers + here.numel());
    if (told[0] == kEnd) return finish_reductions();
    mirror(told);
  }
}

void JoinedSteps::end() {
  MutexLock lock(model_->mutex_);
  model_->orders_.forward = model_->orders_.evaluation = model_->orders_.backward = {};
}

void JoinedSteps::abort(const std::string& why) {
  if (group_.size() == 1) return;
  const std::string text =
      "join: an exception ended the steps of rank " + std::to_string(group_.rank()) + ": " + why;
  const ModelRanks& ranks = model_->units_.front()->ranks();
  for (ProcessGroup group : {ranks.all, ranks.shards, ranks.replicas}) {
    if (group && group.size() > 1 && !group.error()) group.abort(text);
  }
}

JoinedSteps::Message JoinedSteps::message(std::int64_t kind, std::size_t which) const {
  Message message(2 + 2 * words_ + doubles_);
  message[0] = kind;
  message[1] = static_cast<std::int64_t>(which);
  return message;
}

void JoinedSteps::tell(const Message& message) const {
  if (told_.empty()) return;
  const c10::AutoGradMode no_grad(false);
  at::Tensor numbers =
      at::empty({static_cast<std::int64_t>(message.size())}, at::TensorOptions(at::kLong));
  std::memcpy(numbers.mutable_data_ptr(), message.data(), message.size() * sizeof(std::int64_t));
  numbers = numbers.to(group::host_values_device(group_));
  const group::CalledBy by("join");
  ProcessGroup group = group_;
  // The operation keeps the numbers, which nobody else uses.
  for (const int rank : told_) static_cast<void>(group.send(numbers, rank, kTag));
}

void JoinedSteps::mirror(Message& told) {
  const auto which = static_cast<std::size_t>(told[1]);
  if (told[0] == kGather) return mirror_gather(which);
  if (told[0] == kReduce) return mirror_reduce(which, told);
  finish_reductions();
  if (told[0] == kClear) return mirror_clear(which, told);
  if (told[0] == kStep) return mirror_optimizer(which, told);
  double both[2];
  std::memcpy(both, doubles(told), sizeof(both));
  mirrored_clip(*module_, both[0], both[1]);
}

// Waits for the values, which nobody uses here: their memory is free before the next gather.
void JoinedSteps::mirror_gather(std::size_t which) {
  MutexLock lock(model_->mutex_);
  Unit& unit = *model_->units_.at(which);
  unit.start_gather();
  unit.finish_gather();
  unit.free();
}

// Starts all parts of the reduction that do not depend on later ones of other ranks.
void JoinedSteps::mirror_reduce(std::size_t which, const Message& told) {
  MutexLock lock(model_->mutex_);
  const Unit& unit = *model_->units_.at(which);
  const std::vector<at::Tensor> shards = unit.shards();
  Mirrored mirrored;
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (!has_bit(told.data() + 2, i)) continue;
    if (!shards[i].requires_grad()) {
      throw Error(Blame::Caller,
                  "join: parameter '" + unit.parameters()[i].name + "' is frozen on rank " +
                      std::to_string(group_.rank()) +
                      ", which has run out, and trained by others; freeze and thaw parameters "
                      "outside of join");
    }
    if (has_bit(told.data() + 2 + words_, i)) shards[i].mutable_grad().reset();
    parameters.push_back(i);
    mirrored.shards.push_back(shards[i]);
  }
  mirrored.gradients.resize(parameters.size());
  mirrored.reduction =
      model_->reducer_.reduce(unit, parameters, mirrored.gradients, mirrored.gradients);
  mirrored.reduction->order->advance(*mirrored.reduction);
  mirrored_.push_back(std::move(mirrored));
}

void JoinedSteps::mirror_clear(std::size_t which, const Message& told) {
  MutexLock lock(model_->mutex_);
  const std::vector<at::Tensor> shards = model_->units_.at(which)->shards();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (has_bit(told.data() + 2, i)) shards[i].mutable_grad().reset();
  }
}

void JoinedSteps::mirror_optimizer(std::size_t which, Message& told) {
  torch::optim::Optimizer& optimizer = *optimizers_.at(which).optimizer;
  std::vector<double> rates(optimizer.param_groups().size());
  std::memcpy(rates.data(), doubles(told), rates.size() * sizeof(double));
  for (std::size_t i = 0; i < rates.size(); ++i) {
    if (rates[i] == rates[i]) optimizer.param_groups()[i].options().set_lr(rates[i]);
  }
  optimizer.step();
}

void JoinedSteps::finish_reductions() {
  for (Mirrored& mirrored : std::exchange(mirrored_, {})) {
    mirrored.reduction->wait();
    std::vector<at::ScalarType> dtypes;
    for (const at::Tensor& shard : mirrored.shards) dtypes.push_back(shard.scalar_type());
    mirrored.reduction->finish(mirrored.gradients, dtypes);
    for (std::size_t i = 0; i < mirrored.shards.size(); ++i)
      (*torch::autograd::impl::grad_accumulator(mirrored.shards[i]))(
          {std::move(mirrored.gradients[i])});
  }
}

}  // namespace weft::shard
