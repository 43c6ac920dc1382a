// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/group/access.h>
#include <weft/engine/shard/capture.h>
#include <weft/engine/shard/joined_steps.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::shard {

namespace {

// The joins of this process that run: backward may run on threads of libtorch.
struct Running {
  Mutex mutex;
  std::vector<const JoinedSteps*> all WEFT_GUARDED_BY(mutex);
};
Running& running() {
  static auto* const running = new Running();
  return *running;
}

// The sharded model that has shards in the module; null if there is none.
std::shared_ptr<ShardedModel> model_of(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    const Owner owner = owner_of(parameter);
    if (auto model = owner.unit ? owner.unit->model.lock() : nullptr) return model;
  }
  return nullptr;
}

std::vector<std::unique_ptr<WatchedOptimizer>> watched(
    const std::vector<torch::optim::Optimizer*>& optimizers, const ShardedModel& model) {
  std::vector<std::unique_ptr<WatchedOptimizer>> all;
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    if (optimizers[i] == nullptr)
      throw Error(Blame::Caller, "join: one of the optimizers is a null pointer");
    if (std::ranges::count(optimizers, optimizers[i]) > 1)
      throw Error(Blame::Caller, "join: one optimizer is given twice");
    all.push_back(std::make_unique<WatchedOptimizer>(
        *optimizers[i], "join: optimizer " + std::to_string(i), model));
  }
  return all;
}

StepMessage::Sizes sizes_of(const std::vector<std::shared_ptr<Unit>>& units,
                            const std::vector<torch::optim::Optimizer*>& optimizers) {
  StepMessage::Sizes sizes;
  for (const auto& unit : units)
    sizes.parameters = std::max(sizes.parameters, unit->parameters().size());
  for (auto* const optimizer : optimizers)
    sizes.doubles = std::max(sizes.doubles, optimizer->param_groups().size());
  return sizes;
}

}  // namespace

JoinedSteps::JoinedSteps(std::shared_ptr<torch::nn::Module> module,
                         std::shared_ptr<ShardedModel> model, ProcessGroup group,
                         const std::vector<torch::optim::Optimizer*>& optimizers)
    : module_(std::move(module)),
      model_(std::move(model)),
      group_(std::move(group)),
      optimizers_(watched(optimizers, *model_)),
      messages_(group_, sizes_of(model_->units_, optimizers)),
      mirrored_(*module_, *model_, optimizers_, messages_) {
  MutexLock lock(model_->mutex_);
  for (const auto& unit : model_->units_) since_.emplace_back(unit->parameters().size());
  for (const auto& optimizer : optimizers_) rates_.push_back(optimizer->rates());
  versions_ = std::make_unique<GradientVersions>(model_->units_);
  model_->joined_ = this;
  model_->gathered_.set_before_gather([this](const Unit& unit) { gathers(unit); });
  MutexLock running_lock(running().mutex);
  running().all.push_back(this);
}

JoinedSteps::~JoinedSteps() {
  {
    MutexLock lock(running().mutex);
    std::erase(running().all, this);
  }
  MutexLock lock(model_->mutex_);
  model_->joined_ = nullptr;
  model_->gathered_.set_before_gather({});
}

std::string JoinedSteps::description() const {
  std::string text;
  for (const auto& optimizer : optimizers_) text += optimizer->description();
  return text;
}

bool JoinedSteps::note_cleared() {
  bool is_any = false;
  for (const auto& optimizer : optimizers_) is_any |= note_cleared(*optimizer);
  return is_any;
}

bool JoinedSteps::note_cleared(WatchedOptimizer& optimizer) {
  if (!optimizer.has_cleared()) return false;
  for (const auto& [unit, place] : optimizer.parameters())
    since_[unit->index][place].cleared = true;
  return true;
}

JoinedSteps::Has JoinedSteps::state_of(const Unit& unit, std::size_t parameter,
                                       const at::Tensor& shard) const {
  const at::Tensor& gradient = shard.grad();
  if (!gradient.defined()) return Has::Nothing;
  if (is_stand_in(gradient)) return Has::StandIn;
  if (since_[unit.index][parameter].cleared) return Has::Zeros;
  // The module's zero_grad() may write zeros, too, which the probe does not show. This rank may
  // have rows of zeros, or none, without that.
  const bool is_zeroed = versions_->is_written(unit, parameter, gradient) &&
                         gradient.count_nonzero().item<std::int64_t>() == 0;
  return is_zeroed ? Has::Zeros : Has::Gradient;
}

void JoinedSteps::put(Has state, std::size_t parameter, StepMessage& message) {
  if (state == Has::Nothing || state == Has::StandIn) message.add(StepMessage::None, parameter);
  if (state == Has::Zeros || state == Has::StandIn) message.add(StepMessage::Zeros, parameter);
}

// Units that this step does not use are told too: an optimizer passes over their shards if these
// have no gradients.
void JoinedSteps::tell_cleared() {
  if (!messages_.has_readers()) return;
  for (const auto& unit : model_->units_) {
    StepMessage clear = messages_.made(StepMessage::Clear, unit->index);
    bool is_any = false;
    const std::vector<at::Tensor> shards = unit->shards();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const Has state = state_of(*unit, i, shards[i]);
      if (std::exchange(since_[unit->index][i].told, state) == state) continue;
      put(state, i, clear);
      is_any |= state != Has::Gradient;
    }
    if (is_any) messages_.tell(clear);
  }
}

void JoinedSteps::begin_step(const std::vector<bool>& active) {
  std::vector<int> readers;
  const auto first = std::ranges::find(active, true) - active.begin();
  for (std::size_t rank = 0; first == group_.rank() && rank < active.size(); ++rank) {
    if (!active[rank]) readers.push_back(static_cast<int>(rank));
  }
  messages_.set_readers(std::move(readers));
  reduces_first_ = messages_.has_readers();
  has_reduced_ = false;
  for (std::size_t i = 0; i < optimizers_.size(); ++i) rates_[i] = optimizers_[i]->rates();
  MutexLock lock(model_->mutex_);
  // A rank may have run out just now, and the optimizer may step without a backward.
  for (auto& of_unit : since_) {
    for (Since& since : of_unit) since.told = Has::Unknown;
  }
  tell_cleared();
}

void JoinedSteps::end_step() {
  MutexLock lock(model_->mutex_);
  for (std::size_t i = 0; i < optimizers_.size(); ++i) {
    WatchedOptimizer& optimizer = *optimizers_[i];
    const bool has_stepped = optimizer.has_stepped();
    const bool has_cleared = note_cleared(optimizer);
    if (!has_stepped || !messages_.has_readers()) continue;
    if (has_cleared && !optimizer.has_seen_gradients())
      messages_.tell(messages_.made(StepMessage::Zero, i));
    if (!has_cleared && !has_reduced_) require_clear_order(optimizer);
    StepMessage step = messages_.made(StepMessage::Step, i);
    step.set_doubles(rates_[i]);
    messages_.tell(step);
  }
  messages_.tell(messages_.made(StepMessage::End));
  messages_.set_readers({});
}

// In a step with a backward there is no doubt: gradients are zeroed before the backward, or after
// the optimizer's step.
void JoinedSteps::require_clear_order(const WatchedOptimizer& optimizer) const {
  for (const auto& [unit, place] : optimizer.parameters()) {
    if (since_[unit->index][place].told != Has::Gradient) continue;
    if (state_of(*unit, place, unit->shards()[place]) == Has::Gradient) continue;
    throw Error(Blame::Caller,
                "join: the gradient of parameter '" + unit->parameters()[place].name +
                    "' was dropped or zeroed, not by its optimizer, and the optimizer has stepped, "
                    "in a step without a backward: ranks that have run out cannot tell which of "
                    "the two came first. Call the optimizer's zero_grad()");
  }
}

void JoinedSteps::gathers(const Unit& unit) {
  messages_.tell(messages_.made(StepMessage::Gather, unit.index));
}

void JoinedSteps::reduces(const Unit& unit, const std::vector<std::size_t>& parameters) {
  // The ranks that have run out add what was reduced before, and then clear gradients.
  if (note_cleared()) reduces_first_ = true;
  if (std::exchange(reduces_first_, false)) tell_cleared();
  has_reduced_ = true;
  StepMessage reduce = messages_.made(StepMessage::Reduce, unit.index);
  const std::vector<at::Tensor> shards = unit.shards();
  for (const std::size_t i : parameters) {
    reduce.add(StepMessage::Trained, i);
    if (messages_.has_readers()) put(state_of(unit, i, shards[i]), i, reduce);
    since_[unit.index][i] = {};
  }
  for (std::size_t i = 0; i < optimizers_.size(); ++i) rates_[i] = optimizers_[i]->rates();
  messages_.tell(reduce);
}

bool before_sum(const ProcessGroup& group, const at::Tensor& tensor) {
  MutexLock lock(running().mutex);
  for (const JoinedSteps* const joined : running().all) {
    if (joined->sums(group, tensor)) return true;
  }
  return false;
}

bool JoinedSteps::sums(const ProcessGroup& group, const at::Tensor& tensor) const {
  const auto known = model_->units_.front()->ranks().groups();
  const auto found = std::ranges::find_if(known, [&](const ProcessGroup& one) {
    return one && one.size() == group_.size() && group::are_same(one, group);
  });
  if (found == known.end()) return false;
  StepMessage sum = messages_.made(StepMessage::Sum, static_cast<std::size_t>(tensor.numel()));
  sum.set_doubles(
      {static_cast<double>(tensor.scalar_type()), static_cast<double>(found - known.begin())});
  messages_.tell(sum);
  return true;
}

void before_clip(const torch::nn::Module& model, double max_norm, double norm_type, bool is_over) {
  if (parallel::detail::JoinScope::is_on_this_thread())
    JoinedSteps::clips(model, max_norm, norm_type, is_over);
}

void after_clip(const torch::nn::Module& model) {
  if (parallel::detail::JoinScope::is_on_this_thread()) JoinedSteps::has_clipped(model);
}

void JoinedSteps::has_clipped(const torch::nn::Module& model) {
  const auto sharded = model_of(model);
  if (!sharded) return;
  MutexLock lock(sharded->mutex_);
  if (sharded->joined_ != nullptr) sharded->joined_->versions_->note_all();
}

void JoinedSteps::clips(const torch::nn::Module& model, double max_norm, double norm_type,
                        bool is_over) {
  const auto sharded = model_of(model);
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
  StepMessage clip = joined->messages_.made(StepMessage::Clip);
  clip.set_doubles({max_norm, norm_type});
  joined->messages_.tell(clip);
}

void JoinedSteps::end() {
  MutexLock lock(model_->mutex_);
  model_->gathered_.forget_orders();
  // The ranks ran out at different steps, so they keep different gradients.
  if (!model_->reducer_.kept().has_any()) return;
  model_->reducer_.kept().drop_all();
  log::warn(
      "join: the last steps were inside no_sync(), and no backward has averaged what they kept; "
      "these gradients are dropped on all ranks");
}

void JoinedSteps::abort(const std::string& why) {
  if (group_.size() == 1) return;
  const std::string text =
      "join: an exception ended the steps of rank " + std::to_string(group_.rank()) + ": " + why;
  for (ProcessGroup group : model_->units_.front()->ranks().groups()) {
    if (group && group.size() > 1 && !group.error()) group.abort(text);
  }
}

void JoinedSteps::check_forward() const {
  if (is_capturing(*model_->units_.front())) {
    throw Error(Blame::Caller,
                "join: a step of a sharded model cannot be captured into a CUDA graph inside of "
                "join(), because launches of the graph tell ranks that have run out nothing");
  }
  MutexLock lock(model_->mutex_);
  model_->require_no_failed_backward();
}

}  // namespace weft::shard
