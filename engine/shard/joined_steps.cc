// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/shard/capture.h>
#include <weft/engine/shard/joined_steps.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::shard {

namespace {

constexpr int kTag = 31007;  // of messages between ranks
enum Kind : std::int64_t { kGather, kReduce, kClear, kZero, kSum, kClip, kStep, kEnd };

constinit Clip mirrored_clip = nullptr;

// The joins of this process that run: backward may run on threads of libtorch.
struct Running {
  Mutex mutex;
  std::vector<const JoinedSteps*> all WEFT_GUARDED_BY(mutex);
};
Running& running() {
  static auto* const running = new Running();
  return *running;
}

bool has_bit(const std::int64_t* words, std::size_t bit) {
  return (static_cast<std::uint64_t>(words[bit / 64]) >> (bit % 64) & 1) != 0;
}

void set_bit(std::int64_t* words, std::size_t bit) {
  words[bit / 64] = static_cast<std::int64_t>(static_cast<std::uint64_t>(words[bit / 64]) |
                                              std::uint64_t{1} << (bit % 64));
}

// The sharded model that has shards in the module; null if there is none.
std::shared_ptr<ShardedModel> model_of(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    const Owner owner = owner_of(parameter);
    if (auto model = owner.unit ? owner.unit->model.lock() : nullptr) return model;
  }
  return nullptr;
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
    if (std::ranges::count(optimizers, optimizers[i]) > 1)
      throw Error(Blame::Caller, "join: one optimizer is given twice");
    optimizers_.push_back(std::make_unique<WatchedOptimizer>(
        *optimizers[i], "join: optimizer " + std::to_string(i), *model_));
    doubles_ = std::max(doubles_, optimizers[i]->param_groups().size());
  }
  MutexLock lock(model_->mutex_);
  for (const auto& unit : model_->units_) {
    words_ = std::max(words_, (unit->parameters().size() + 63) / 64);
    since_.emplace_back(unit->parameters().size());
  }
  for (const auto& optimizer : optimizers_) rates_.push_back(optimizer->rates());
  versions_ = std::make_unique<GradientVersions>(model_->units_);
  model_->joined_ = this;
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

// Two bits for each parameter: see mirror_clear().
void JoinedSteps::put(Has state, std::size_t parameter, Message& message) const {
  if (state == Has::Nothing || state == Has::StandIn) set_bit(bits(message) + words_, parameter);
  if (state == Has::Zeros || state == Has::StandIn) set_bit(bits(message) + 2 * words_, parameter);
}

// Also of units that this step does not use, which an optimizer leaves alone then.
void JoinedSteps::tell_cleared() {
  if (told_.empty()) return;
  for (const auto& unit : model_->units_) {
    Message clear = message(kClear, unit->index);
    bool is_any = false;
    const std::vector<at::Tensor> shards = unit->shards();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const Has state = state_of(*unit, i, shards[i]);
      if (std::exchange(since_[unit->index][i].told, state) == state) continue;
      put(state, i, clear);
      is_any |= state != Has::Gradient;
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
    if (!has_stepped || told_.empty()) continue;
    if (has_cleared && !optimizer.has_seen_gradients()) tell(message(kZero, i));
    if (!has_cleared && !has_reduced_) require_clear_order(optimizer);
    Message step = message(kStep, i);
    const std::vector<double>& rates = rates_[i];
    std::memcpy(doubles(step), rates.data(), rates.size() * sizeof(double));
    tell(step);
  }
  tell(message(kEnd));
  told_.clear();
}

// With a backward between them, gradients are zeroed before it or after the step.
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

void JoinedSteps::gathers(const Unit& unit) { tell(message(kGather, unit.index)); }

void JoinedSteps::reduces(const Unit& unit, const std::vector<std::size_t>& parameters) {
  // Before the ranks that have run out clear, they add what was reduced before.
  if (note_cleared()) reduces_first_ = true;
  if (std::exchange(reduces_first_, false)) tell_cleared();
  has_reduced_ = true;
  Message reduce = message(kReduce, unit.index);
  const std::vector<at::Tensor> shards = unit.shards();
  for (const std::size_t i : parameters) {
    set_bit(bits(reduce), i);
    if (!told_.empty()) put(state_of(unit, i, shards[i]), i, reduce);
    since_[unit.index][i] = {};
  }
  for (std::size_t i = 0; i < optimizers_.size(); ++i) rates_[i] = optimizers_[i]->rates();
  tell(reduce);
}

bool before_sum(const ProcessGroup& group, const at::Tensor& tensor) {
  MutexLock lock(running().mutex);
  for (const JoinedSteps* const joined : running().all) {
    if (joined->sums(group, tensor)) return true;
  }
  return false;
}

// Of a mesh, the group along one axis may be all ranks too.
std::array<ProcessGroup, 3> JoinedSteps::groups() const {
  const ModelRanks& ranks = model_->units_.front()->ranks();
  return {ranks.all, ranks.shards, ranks.replicas};
}

bool JoinedSteps::sums(const ProcessGroup& group, const at::Tensor& tensor) const {
  const auto known = groups();
  const auto found = std::ranges::find_if(known, [&](const ProcessGroup& one) {
    return one && one.size() == group_.size() && group::are_same(one, group);
  });
  if (found == known.end()) return false;
  Message sum = message(kSum, static_cast<std::size_t>(tensor.numel()));
  bits(sum)[0] = static_cast<std::int64_t>(tensor.scalar_type());
  bits(sum)[1] = found - known.begin();
  tell(sum);
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
  Message clip = joined->message(kClip);
  const double both[] = {max_norm, norm_type};
  std::memcpy(joined->doubles(clip), both, sizeof(both));
  joined->tell(clip);
}

void JoinedSteps::mirror_step(int leader, int divisor) {
  const c10::AutoGradMode no_grad(false);
  {
    MutexLock lock(model_->mutex_);
    model_->drop_failed();
    model_->forget_reductions();
    model_->drop_gathered();
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
    const auto* const numbers = static_cast<const std::int64_t*>(here.const_data_ptr());
    Message told(numbers, numbers + here.numel());
    if (told[0] == kEnd) return finish_reductions();
    mirror(told);
  }
}

void JoinedSteps::end() {
  MutexLock lock(model_->mutex_);
  model_->orders_.forward = model_->orders_.evaluation = model_->orders_.backward = {};
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
  const ModelRanks& ranks = model_->units_.front()->ranks();
  for (ProcessGroup group : {ranks.all, ranks.shards, ranks.replicas}) {
    if (group && group.size() > 1 && !group.error()) group.abort(text);
  }
}

JoinedSteps::Message JoinedSteps::message(std::int64_t kind, std::size_t which) const {
  Message message(2 + 3 * words_ + doubles_);
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
  if (told[0] == kSum) return mirror_sum(told);
  finish_reductions();
  if (told[0] == kClear) {
    MutexLock lock(model_->mutex_);
    return mirror_clear(model_->units_.at(which)->shards(), told);
  }
  if (told[0] == kZero) return optimizers_.at(which)->zero_gradients();
  std::vector<double> given(doubles_);
  std::memcpy(given.data(), doubles(told), given.size() * sizeof(double));
  if (told[0] == kStep) return optimizers_.at(which)->step(given);
  mirrored_clip(*module_, given[0], given[1]);
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
void JoinedSteps::mirror_reduce(std::size_t which, Message& told) {
  MutexLock lock(model_->mutex_);
  const Unit& unit = *model_->units_.at(which);
  const std::vector<at::Tensor> shards = unit.shards();
  Mirrored mirrored;
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (!has_bit(bits(told), i)) continue;
    if (!shards[i].requires_grad()) {
      throw Error(Blame::Caller,
                  "join: parameter '" + unit.parameters()[i].name + "' is frozen on rank " +
                      std::to_string(group_.rank()) +
                      ", which has run out, and trained by others; freeze and thaw parameters "
                      "outside of join");
    }
    parameters.push_back(i);
    mirrored.shards.push_back(shards[i]);
  }
  mirror_clear(shards, told);
  mirrored.gradients.resize(parameters.size());
  mirrored.reduction =
      model_->reducer_.reduce(unit, parameters, mirrored.gradients, mirrored.gradients);
  mirrored.reduction->order->advance(*mirrored.reduction);
  mirrored_.push_back(std::move(mirrored));
}

void JoinedSteps::mirror_sum(const Message& told) {
  const c10::Device device = model_->units_.front()->device();
  const at::TensorOptions options(static_cast<at::ScalarType>(told[2]));
  ProcessGroup group = groups().at(static_cast<std::size_t>(told[3]));
  at::Tensor zeros = at::zeros(
      {told[1]},
      options.device(device.is_cpu() ? group::host_values_device(group) : group.device()));
  group::all_reduce(group, zeros, ReduceOp::Sum).wait();
}

void JoinedSteps::mirror_clear(const std::vector<at::Tensor>& shards, Message& told) const {
  for (std::size_t i = 0; i < shards.size(); ++i) {
    at::Tensor& gradient = shards[i].mutable_grad();
    const bool has_none = has_bit(bits(told) + words_, i);
    const bool has_zeros = has_bit(bits(told) + 2 * words_, i);
    if (has_none && has_zeros) {  // a stand-in: no_sync() has kept gradients, perhaps here as well
      if (!is_stand_in(gradient)) gradient.reset();
    } else if (has_none) {
      gradient.reset();
    } else if (has_zeros) {  // of its own, where this rank has dropped what others have zeroed
      gradient = at::zeros_like(shards[i].detach());
    }
  }
  model_->reducer_.kept().drop_zeroed();
}

void JoinedSteps::finish_reductions() {
  torch::autograd::edge_list edges;
  std::vector<at::Tensor> gradients;
  for (Mirrored& mirrored : std::exchange(mirrored_, {})) {
    mirrored.reduction->wait();
    std::vector<at::ScalarType> dtypes;
    for (const at::Tensor& shard : mirrored.shards) dtypes.push_back(shard.scalar_type());
    mirrored.reduction->finish(mirrored.gradients, dtypes);
    mirrored.reduction->wait_for_host();
    for (std::size_t i = 0; i < mirrored.shards.size(); ++i) {
      if (!mirrored.gradients[i].defined()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(mirrored.shards[i]));
      gradients.push_back(std::move(mirrored.gradients[i]));
    }
  }
  // The engine calls the hooks of the shards too.
  if (!edges.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        edges, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  model_->units_.front()->offload->wait();
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
