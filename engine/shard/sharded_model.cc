// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/base/log.h>
#include <weft/engine/autograd/execution_context.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/shard/capture.h>
#include <weft/engine/shard/joined_steps.h>
#include <weft/engine/shard/kept_gradients.h>
#include <weft/engine/shard/sharded_model.h>

namespace weft::shard {

namespace {

using Pass = GatheredUnits::Pass;

bool is_in_backward() { return static_cast<bool>(torch::autograd::get_current_node()); }

// True if one of them does.
bool require_grad(const std::vector<std::vector<at::Tensor>>& shards) {
  return std::ranges::any_of(shards, [](const std::vector<at::Tensor>& of_unit) {
    return std::ranges::any_of(of_unit, [](const at::Tensor& one) { return one.requires_grad(); });
  });
}

Error outside(const Unit& unit, std::size_t parameter) {
  return {Blame::Caller,
          "parameter '" + unit.parameters()[parameter].name +
              "' is sharded and was used outside of the forward and backward of its "
              "FullyShardedDataParallel, where other ranks may not use it at the same time; call "
              "the model through its FullyShardedDataParallel, make optimizers of "
              "model->parameters() after sharding, or read it under weft::FullParameters "
              "(model->parameters() are this rank's rows)"};
}

// The bytes that units, and gradients under way, may free before others take them. FullParameters,
// which needs more, leaves no more behind.
std::size_t most_idle(const std::vector<std::shared_ptr<Unit>>& units, std::size_t prefetch) {
  std::size_t largest = 0, most_reduced = 0, kept = 0;
  for (const auto& unit : units) {
    largest = std::max(largest, unit->bytes());
    std::size_t reduced = 0;
    for (const UnitParameter& parameter : unit->parameters())
      reduced += static_cast<std::size_t>(parameter.whole.numel()) *
                 at::elementSize(reduced_in(*unit, parameter));
    most_reduced = std::max(most_reduced, reduced);
    if (!unit->options().reshard_after_forward) kept += unit->bytes();
  }
  const std::size_t gathered = std::min(1 + prefetch, units.size());
  const std::size_t bytes = gathered * largest + 2 * std::max(largest, most_reduced) + kept;
  return bytes + bytes / 4;  // the pool rounds its blocks up by at most a fourth
}

}  // namespace

ShardedModel::ShardedModel(std::vector<std::shared_ptr<Unit>> units, std::size_t prefetch)
    : units_(std::move(units)),
      gathered_(units_, prefetch),
      versions_(units_.size()),
      reducer_(units_) {}

std::shared_ptr<ShardedModel> ShardedModel::make(std::vector<std::shared_ptr<Unit>> units,
                                                 std::size_t prefetch) {
  std::shared_ptr<ShardedModel> model(new ShardedModel(std::move(units), prefetch));
  const auto pool = std::make_shared<ReceivePool>(most_idle(model->units_, prefetch),
                                                  ReceivePool::Total::AsMuchAsWasUsed);
  const auto offload = std::make_shared<Offload>();
  for (std::size_t i = 0; i < model->units_.size(); ++i) {
    model->units_[i]->index = i;
    model->units_[i]->model = model;
    model->units_[i]->pool = pool;
    model->units_[i]->offload = offload;
  }
  // From now on libtorch refuses requires_grad_(false) of the members, and optimizers made of them.
  for (const auto& unit : model->units_) {
    if (unit->device().is_meta()) continue;  // until materialize()
    const std::vector<at::Tensor> shards = unit->shards();
    if (shards.front().is_inference()) continue;  // they never train
    attach_nodes(*unit, shards, version_of(shards), /*synchronizes=*/true);
  }
  return model;
}

// The nodes lead to the shards, which own their units, which own the tensors with the nodes.
ShardedModel::~ShardedModel() {
  for (const auto& unit : units_) {
    if (!unit->is_held()) unit->free();
    unit->pool = std::make_shared<ReceivePool>(/*most_idle=*/0);  // the shards keep the unit
    detach_nodes(*unit);
  }
}

Error ShardedModel::refused_context() {
  return {Blame::Caller,
          "a FullyShardedDataParallel takes no part in a distributed backward: its parameters are "
          "gathered and its gradients reduced by libtorch's own engine, which an AutogradContext "
          "does not use; call loss.backward() outside of the AutogradContext"};
}

void ShardedModel::begin_forward(bool trains, int divisor) {
  if (trains && autograd::current_context() != nullptr) throw refused_context();
  if (is_in_backward()) {
    throw Error(Blame::Caller,
                "the forward of a FullyShardedDataParallel was called inside of a backward; to "
                "compute a part of the model again there, call that part and not the wrapper");
  }
  MutexLock lock(mutex_);
  if (forwards_ == 0) {
    for (const auto& unit : units_) unit->divisor = divisor;
    begin_pass(trains);
  }
  ++forwards_;
}

void ShardedModel::begin_pass(bool trains) {
  std::vector<std::vector<at::Tensor>> shards;  // by unit, if it trains
  for (const auto& unit : units_) {
    if (!unit->is_held()) {
      shards.push_back(unit->shards());
      continue;
    }
    if (!trains) continue;
    throw Error(Blame::Caller,
                "a forward with gradients began while weft::FullParameters holds the whole "
                "parameters; destroy that first, or evaluate under torch::NoGradGuard");
  }
  const Pass pass = trains ? Pass::Forward : Pass::Evaluation;
  const bool is_captured = is_capturing(*units_.front());
  if (is_captured) {
    require_capturable(
        units_, gathered_.is_recorded(pass) && (!trains || gathered_.is_recorded(Pass::Backward)));
    if (trains) require_averaging(synchronizes_ && !reducer_.kept().has_any());
  }
  if (trains) {
    drop_failed();
    reducer_.kept().drop_zeroed();
    if (require_grad(shards)) reducer_.kept().require_trained(units_);
  }
  trains_ = trains;
  captured_ = is_captured;
  gathered_.begin(pass);
  if (trains) forget_reductions();
  for (std::size_t i = 0; trains && i < units_.size(); ++i) {
    versions_[i] = version_of(shards[i]);
    attach_nodes(*units_[i], shards[i], versions_[i], synchronizes_);
  }
  gathered_.start_ahead(pass);
}

void ShardedModel::forget_reductions() {
  reducer_.forget();
  units_.front()->offload->forget();
}

bool ShardedModel::is_in_forward() const {
  MutexLock lock(mutex_);
  return forwards_ > 0;
}

void ShardedModel::end_forward() {
  {
    MutexLock lock(mutex_);
    if (--forwards_ > 0) return;
    gathered_.end_forward(trains_);
    if (trains_) return;
  }
  try {
    units_.front()->offload->wait_until_read();
  } catch (const std::exception& error) {
    log::error(std::string("FullyShardedDataParallel: ") + error.what());
  }
}

void ShardedModel::before_operator(const std::vector<Belongs>& used) {
  std::vector<std::pair<std::shared_ptr<ShardedModel>, std::vector<Belongs>>> models;
  for (const Belongs& parameter : used) {
    const auto unit = parameter.unit.lock();
    if (!unit) {
      throw Error(Blame::Caller,
                  "a parameter of a sharded module was used after the module's shards were "
                  "destroyed; keep the module, or its parameters()");
    }
    if (unit->is_held()) continue;
    auto model = unit->model.lock();
    if (!model) throw outside(*unit, parameter.parameter);
    auto same = std::ranges::find(models, model, [](const auto& item) { return item.first; });
    if (same == models.end())
      same = models.emplace(models.end(), std::move(model), std::vector<Belongs>());
    same->second.push_back(parameter);
  }
  for (const auto& [model, belonging] : models) model->use(belonging);
}

void ShardedModel::after_change(const Belongs& parameter) {
  const auto unit = parameter.unit.lock();
  if (!unit || unit->is_held()) return;
  throw Error(Blame::Caller,
              "parameter '" + unit->parameters()[parameter.parameter].name +
                  "' was written in place while it was gathered; the change would be lost, because "
                  "the shards were not written. Change model->parameters() outside of the forward, "
                  "or write under weft::FullParameters(model, /*writable=*/true)");
}

void ShardedModel::use(const std::vector<Belongs>& used) {
  if (autograd::Pass::current() != nullptr) throw refused_context();
  const bool is_backward = is_in_backward();
  MutexLock lock(mutex_);
  std::vector<std::size_t> units;
  for (const Belongs& parameter : used) {
    const auto unit = parameter.unit.lock();
    if (!is_backward && forwards_ == 0) throw outside(*unit, parameter.parameter);
    if (std::ranges::find(units, unit->index) == units.end()) units.push_back(unit->index);
  }
  if (is_backward && gathered_.begins())
    require_captured_alike(captured_, is_capturing(*units_.front()));
  if (!gathered_.are_ready(units)) {
    for (const std::size_t unit : units) {
      if (is_backward) require_version(*units_[unit], versions_[unit]);
    }
    gathered_.gather(units, is_backward ? Pass::Backward
                            : trains_   ? Pass::Forward
                                        : Pass::Evaluation);
  }
  for (const std::size_t unit : units) units_[unit]->note_stream();
}

void ShardedModel::require_version(const Unit& unit, std::uint64_t version) {
  if (version_of(unit.shards()) == version) return;
  throw Error(Blame::Caller,
              "parameters of unit '" + unit.name() +
                  "' were changed between a forward and its backward, which needs the values of "
                  "the forward; step the optimizer after all backwards of a forward");
}

std::shared_ptr<Reduction> ShardedModel::take_gradients(Unit& unit,
                                                        const std::vector<std::size_t>& parameters,
                                                        bool synchronizes,
                                                        std::vector<at::Tensor> gradients,
                                                        std::vector<at::Tensor>& outputs) {
  const c10::AutoGradMode no_grad(false);
  // A custom function may return a parameter itself. Reading it calls use(), which takes the mutex.
  for (at::Tensor& gradient : gradients) {
    if (is_shell(gradient)) gradient = gradient.clone();
  }
  MutexLock lock(mutex_);
  begin_backward();
  if (unit.offloads()) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [offload = unit.offload] { offload->wait(); });
  }
  gathered_.end_use(unit.index);
  require_dense(unit, parameters, gradients);
  if (!synchronizes) {
    reducer_.kept().add(unit, parameters, gradients);
    return nullptr;
  }
  if (captured_) require_gradients(unit, parameters, gradients);
  average_rest_later();
  if (joined_ != nullptr) joined_->reduces(unit, parameters);
  return reducer_.reduce(unit, parameters, std::move(gradients), outputs);
}

// A program may call zero_grad() between a forward and its backward.
void ShardedModel::begin_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  const int last = std::exchange(backwards_.last, task);
  if (last == task) return;
  if (backwards_.averages && !backwards_.running.expired()) return;  // it runs inside of that one
  if (joined_ != nullptr) require_no_failed_backward();
  drop_failed();
  reducer_.kept().drop_zeroed();
  // A backward with a smaller number is not new: it continues after one that ran inside of it.
  if (joined_ != nullptr && task > last) joined_->begins_backward();
}

void ShardedModel::require_no_failed_backward() const {
  if (!backwards_.averages || !backwards_.running.expired()) return;
  throw Error(Blame::Caller,
              "join: a backward of this rank has failed, of which the ranks that have run out have "
              "done a part; let the exception end the steps, which ends the join on all ranks");
}

bool ShardedModel::keeps_gradient_of(const at::Tensor& parameter) {
  const Owner owner = owner_of(parameter);
  const auto model = owner.unit ? owner.unit->model.lock() : nullptr;
  if (!model) return false;
  MutexLock lock(model->mutex_);
  return model->reducer_.kept().keeps(*owner.unit, owner.parameter);
}

void ShardedModel::require_nothing_kept() {
  MutexLock lock(mutex_);
  reducer_.kept().drop_zeroed();
  if (!reducer_.kept().has_any()) return;
  throw Error(Blame::Caller,
              "join: the model keeps gradients of an earlier no_sync(); average them by a backward "
              "outside of no_sync(), or drop them by zero_grad(), before the join");
}

// Part of the gradients are averaged and part of them are not, and no later backward knows which.
void ShardedModel::drop_failed() {
  if (!std::exchange(backwards_.averages, false)) return;
  reducer_.forget();
  reducer_.kept().drop_all();
  if (!std::exchange(backwards_.averages_kept, false)) return;
  log::warn(
      "FullyShardedDataParallel: a backward has failed while it averaged gradients that "
      "no_sync() had kept, and they are dropped. Call zero_grad() before the next backward: "
      "some of them may have been added to the shards' gradients");
}

void ShardedModel::average_rest_later() {
  const int task = torch::autograd::get_current_graph_task_id();
  auto running = backwards_.running.lock();
  if (running && *running == task) return;
  // libtorch destroys the callback with all else of the backward.
  running = std::make_shared<const int>(task);
  backwards_.running = running;
  backwards_.averages = true;
  backwards_.averages_kept = reducer_.kept().has_any();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), running] {
    if (const auto model = weak.lock()) model->average_rest();
  });
}

void ShardedModel::average_rest() {
  const c10::AutoGradMode no_grad(false);
  struct Rest {
    std::vector<at::Tensor> shards, gradients;  // of the parameters that are trained now
    std::shared_ptr<Reduction> reduction;
  };
  std::vector<Rest> rests;
  {
    MutexLock lock(mutex_);
    for (const auto& unit : units_) {
      if (!reducer_.kept().has(*unit)) continue;
      Rest rest;
      std::vector<std::size_t> parameters;
      const std::vector<at::Tensor> shards = unit->shards();
      for (std::size_t i = 0; i < shards.size(); ++i) {
        if (!shards[i].requires_grad()) continue;
        parameters.push_back(i);
        rest.shards.push_back(shards[i]);
      }
      rest.gradients.resize(parameters.size());
      if (captured_) require_gradients(*unit, parameters, rest.gradients);
      if (joined_ != nullptr) joined_->reduces(*unit, parameters);
      rest.reduction = reducer_.reduce(*unit, parameters, rest.gradients, rest.gradients);
      rests.push_back(std::move(rest));
    }
  }
  torch::autograd::edge_list edges;
  std::vector<at::Tensor> gradients;
  for (Rest& rest : rests) {
    rest.reduction->wait();
    std::vector<at::ScalarType> dtypes;
    for (const at::Tensor& shard : rest.shards) dtypes.push_back(shard.scalar_type());
    rest.reduction->finish(rest.gradients, dtypes);
    rest.reduction->wait_for_host();
    for (std::size_t i = 0; i < rest.shards.size(); ++i) {
      if (!rest.gradients[i].defined()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(rest.shards[i]));
      gradients.push_back(std::move(rest.gradients[i]));
    }
  }
  // The engine calls the hooks of the shards too.
  if (!edges.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        edges, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  MutexLock lock(mutex_);
  backwards_.averages = false;
  end_use_of_frozen();
}

// No node ends the use of a unit that has no trained parameter.
void ShardedModel::end_use_of_frozen() {
  if (forwards_ > 0 || is_in_backward()) return;
  for (const auto& unit : units_) {
    if (unit->is_held() || unit->state() == Unit::State::Sharded) continue;
    if (!require_grad({unit->shards()})) gathered_.end_use(unit->index);
  }
}

GatheredUnits::Statistics ShardedModel::statistics() const {
  MutexLock lock(mutex_);
  return gathered_.statistics();
}

}  // namespace weft::shard
