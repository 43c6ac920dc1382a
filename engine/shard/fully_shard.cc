// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <sstream>
#include <unordered_set>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/shard_groups.h>
#include <weft/engine/shard/fully_shard.h>
#include <weft/engine/shard/joined_steps.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/meta_tensors.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/shard/unit_choice.h>

namespace weft::shard {

struct ShardedRoot::State {
  std::shared_ptr<torch::nn::Module> module;
  ProcessGroup group;  // of all ranks that train it
  std::shared_ptr<ShardedModel> model;
  FullyShardOptions options;
  std::unique_ptr<JoinedSteps> joined;  // inside of weft::join
};

namespace {

void check_options(const FullyShardOptions& options) {
  if (options.prefetch < 0) {
    throw Error(Blame::Caller, "FullyShardOptions::prefetch is " +
                                   std::to_string(options.prefetch) + "; give 0 or more units");
  }
  for (const auto& dtype : {options.param_dtype, options.reduce_dtype}) {
    if (dtype && !at::isFloatingType(*dtype)) {
      throw Error(Blame::Caller, std::string("FullyShardOptions: ") + c10::toString(*dtype) +
                                     " is no floating-point dtype");
    }
  }
}

// The options and units that all ranks need alike, one line each.
std::string agreed(const FullyShardOptions& options, const std::vector<ChosenUnit>& units) {
  const auto text = [](const std::optional<torch::Dtype>& dtype) {
    return dtype ? c10::toString(*dtype) : "none";
  };
  std::ostringstream lines;
  lines << std::boolalpha << "FullyShardOptions::reshard_after_forward "
        << options.reshard_after_forward << "\nFullyShardOptions::param_dtype "
        << text(options.param_dtype) << "\nFullyShardOptions::reduce_dtype "
        << text(options.reduce_dtype) << "\nFullyShardOptions::prefetch " << options.prefetch
        << "\n";
  for (const ChosenUnit& unit : units)
    lines << "the unit '" << unit.name << "' of " << unit.parameters.size() << " parameters\n";
  return lines.str();
}

std::vector<parallel::NamedTensor> named_values(const torch::nn::Module& module) {
  std::vector<parallel::NamedTensor> named;
  for (const auto& item : module.named_parameters()) {
    if (owner_of(item.value()).unit) continue;  // its rows may differ in number
    const std::string on_meta = item.value().is_meta() ? " (on meta)" : "";
    named.push_back(
        {item.key() + (item.value().requires_grad() ? "" : " (frozen)") + on_meta, item.value()});
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) named.push_back({item.key(), item.value()});
  }
  return named;
}

void broadcast(const ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root = 0) {
  parallel::DeviceGroups groups(group, tensors);
  parallel::broadcast_values(groups, tensors, root, 0);
}

std::vector<at::Tensor> usable_buffers(const torch::nn::Module& module) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined() && buffer.numel() > 0 && !buffer.is_meta()) buffers.push_back(buffer);
  }
  return buffers;
}

// Replaces each parameter by its shard, in all its places.
std::shared_ptr<Unit> make_unit(const ChosenUnit& chosen, const ModelRanks& ranks,
                                const FullyShardOptions& options) {
  std::vector<Unit::Given> given;
  for (const ChosenParameter& parameter : chosen.parameters) {
    const ParameterPlace& place = parameter.places.front();
    given.push_back({place.name, place.tensor, place.holder, place.key});
  }
  std::vector<at::Tensor> shards;
  const auto number =
      static_cast<std::uint32_t>(group::next_number(ranks.all, "FullyShardedDataParallel's unit"));
  auto unit = Unit::make(chosen.name, number, given, ranks, options, shards);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const ParameterPlace& place : chosen.parameters[i].places)
      parameter_entry(*place.module, place.key) = shards[i];
  }
  return unit;
}

// The group that has the other rows of the shard; empty for a scalar, which every rank keeps.
ProcessGroup group_of_shard(const at::Tensor& parameter) {
  const Owner owner = owner_of(parameter);
  if (!owner.unit || owner.unit->parameters()[owner.parameter].is_scalar) return {};
  return owner.unit->group();
}

// The group that has the same rows, which must stay the same.
ProcessGroup replicas_of_shard(const at::Tensor& parameter) {
  const Owner owner = owner_of(parameter);
  return owner.unit ? owner.unit->ranks().replicas : ProcessGroup();
}

// Checks the choice on all ranks, copies rank 0's values, and shards the units one after another.
std::vector<std::shared_ptr<Unit>> make_units(torch::nn::Module& module, ModelRanks ranks,
                                              const FullyShardOptions& options, const char* name,
                                              const std::vector<ChosenUnit>& chosen) {
  install({&ShardedModel::before_operator, &ShardedModel::after_change});
  group::set_shard_groups(&group_of_shard, &replicas_of_shard);
  std::vector<std::shared_ptr<Unit>> units;
  parallel::on_all_ranks(ranks.all, name, "it", [&] {
    parallel::check_same_model(ranks.all, named_values(module), agreed(options, chosen));
    broadcast(ranks.all, usable_buffers(module));
    for (const ChosenUnit& unit : chosen) {
      std::vector<at::Tensor> tensors;
      for (const ChosenParameter& parameter : unit.parameters) {
        const at::Tensor& tensor = parameter.places.front().tensor;
        if (tensor.numel() > 0 && !tensor.is_meta()) tensors.push_back(tensor);
      }
      broadcast(ranks.all, tensors);
      units.push_back(make_unit(unit, ranks, options));
    }
  });
  return units;
}

void require_usable(const std::shared_ptr<torch::nn::Module>& module,
                    const FullyShardOptions& options, const char* name) {
  if (!module) throw Error(Blame::Caller, std::string(name) + ": the module is empty");
  check_options(options);
}

// Collective. Calls `check` and throws what it throws on one rank on all of them.
void check_on_all(const ModelRanks& ranks, const char* name, const std::function<void()>& check) {
  parallel::on_all_ranks(ranks.all, name, "it", [&] {
    ProcessGroup all = ranks.all;
    group::agree(all, group::error_of(check));
  });
}

constexpr const char* kRoot = "FullyShardedDataParallel";
constexpr const char* kUnit = "fully_shard";

// Throws Caller for shards of other ranks, or of another root.
void require_free(torch::nn::Module& module, const ModelRanks& ranks) {
  for (const auto& unit : units_in(module)) {
    const std::string sharded = kRoot + (": parameter '" + unit->parameters().front().name + "' ");
    if (!unit->ranks().are_same(ranks)) {
      throw Error(Blame::Caller, sharded +
                                     "was sharded over another group or mesh by fully_shard(); "
                                     "pass the same to both");
    }
    if (unit->model.lock()) {
      throw Error(Blame::Caller, sharded +
                                     "belongs to another FullyShardedDataParallel already; wrap "
                                     "only the root");
    }
  }
}

Error refused_join() {
  return {Blame::Caller,
          "join: a sharded model is joined together with its optimizer, since a rank that has run "
          "out goes on stepping its rows; call weft::join(sharded, optimizer, steps)"};
}

}  // namespace

ShardedRoot::ShardedRoot(const std::shared_ptr<torch::nn::Module>& module, const GroupOrMesh& over,
                         const FullyShardOptions& options)
    : state_(std::make_unique<State>()) {
  const MakingAsUsual usual;  // if an OnMeta lives
  const ModelRanks ranks(over, kRoot);
  std::vector<ChosenUnit> chosen;
  check_on_all(ranks, kRoot, [&] {
    require_usable(module, options, kRoot);
    require_free(*module, ranks);
    chosen = choose_units(module, options);
    if (chosen.empty() && units_in(*module).empty())
      throw Error(Blame::Caller, std::string(kRoot) + ": the module has no parameters");
  });
  const bool is_one = chosen.size() == 1 && chosen.front().name.empty();
  if (options.units && is_one && units_in(*module).empty() && ranks.all.rank() == 0) {
    log::warn(
        "FullyShardedDataParallel: FullyShardOptions::units has chosen no submodule that has "
        "parameters, so the whole model is one unit, and whole on every rank in each forward and "
        "backward");
  }
  make_units(*module, ranks, options, kRoot, chosen);
  auto units = units_in(*module);
  std::unordered_set<const void*> named;  // a shard with several places has the first one's name
  for (const ParameterPlace& place : places_in(*module)) {
    const auto [unit, index] = owner_of(place.tensor);
    if (unit && named.insert(place.tensor.unsafeGetTensorImpl()).second)
      unit->rename(index, place.name);
  }
  state_->module = module;
  state_->group = ranks.all;
  state_->options = options;
  state_->model = ShardedModel::make(std::move(units), static_cast<std::size_t>(options.prefetch));
}

ShardedRoot::~ShardedRoot() = default;
ShardedRoot::ShardedRoot(ShardedRoot&&) noexcept = default;
ShardedRoot& ShardedRoot::operator=(ShardedRoot&&) noexcept = default;

ShardedRoot::State& ShardedRoot::state() const {
  if (!state_)
    throw Error(Blame::Caller, "this FullyShardedDataParallel is empty: it was moved from");
  return *state_;
}

ShardedRoot::Forward::Forward(ShardedRoot& root) : root_(root) {
  const bool is_joined = root_.join_scope_ != nullptr;
  if (!is_joined && parallel::detail::JoinScope::is_on_this_thread()) throw refused_join();
  const auto& model = root_.state().model;
  if (is_joined && !model->is_in_forward()) {
    root_.state_->joined->check_forward();
    root_.join_scope_->announce_step(root_, root_.is_synchronizing());
  }
  model->begin_forward(c10::GradMode::is_enabled(), is_joined ? root_.join_scope_->divisor() : 0);
}

ShardedRoot::Forward::~Forward() { root_.state_->model->end_forward(); }

at::Tensor ShardedRoot::cast(const at::Tensor& input) const {
  const auto& dtype = state_->options.param_dtype;
  const bool casts = dtype && input.defined() && at::isFloatingType(input.scalar_type());
  return casts ? input.to(*dtype) : input;
}

bool ShardedRoot::is_synchronizing() const { return state_->model->is_synchronizing(); }

ProcessGroup& ShardedRoot::join_group() { return state().group; }

void ShardedRoot::check_join() const {
  if (!state().joined) throw refused_join();
}

void ShardedRoot::begin_step(const std::vector<bool>& active) {
  state_->joined->begin_step(active);
}

void ShardedRoot::end_step() { state_->joined->end_step(); }

void ShardedRoot::fail(const std::string& why) { state_->joined->abort(why); }

void ShardedRoot::mirror_step(const parallel::detail::JoinStep& step) {
  state_->joined->mirror_step(step.first_rank, join_scope_->divisor());
}

void ShardedRoot::take_over(int last_rank) {
  state_->joined->end();
  broadcast(state_->group, usable_buffers(*state_->module), last_rank);
}

ShardedRoot::NoSync ShardedRoot::no_sync(bool on) { return {state().model, on}; }

void shard_as_unit(const std::shared_ptr<torch::nn::Module>& module, const GroupOrMesh& over,
                   const FullyShardOptions& options) {
  const MakingAsUsual usual;  // if an OnMeta lives
  const ModelRanks ranks(over, kUnit);
  ChosenUnit chosen;
  check_on_all(ranks, kUnit, [&] {
    require_usable(module, options, kUnit);
    if (options.units) {
      throw Error(Blame::Caller,
                  "fully_shard makes one unit of the module; FullyShardOptions::units belongs to "
                  "the FullyShardedDataParallel of the root");
    }
    chosen = whole_unit(module, module->name());
    if (chosen.parameters.empty()) {
      throw Error(Blame::Caller,
                  "fully_shard: the module has no parameters that are not sharded already");
    }
  });
  make_units(*module, ranks, options, kUnit, {chosen});
}

}  // namespace weft::shard

namespace weft {

void join(shard::ShardedRoot& model, const std::vector<torch::optim::Optimizer*>& optimizers,
          const std::function<void()>& steps, JoinOptions options) {
  if (!options.enable) return steps();
  if (model.state().joined)
    throw Error(Blame::Caller, "join: this sharded model is inside another join already");
  ProcessGroup group = model.state_->group;
  struct Joining {
    std::unique_ptr<shard::JoinedSteps>& joined;
    ~Joining() { joined.reset(); }
  } joining{model.state_->joined};
  group::agree(group, group::error_of([&] {
                 if (optimizers.empty())
                   throw Error(Blame::Caller, "join: no optimizer of the sharded model is given");
                 model.state_->model->require_nothing_kept();
                 joining.joined = std::make_unique<shard::JoinedSteps>(
                     model.state_->module, model.state_->model, group, optimizers);
               }));
  const std::string description = joining.joined->description();
  if (!parallel::is_same_on_all(group, description)) {
    group::throw_together(group,
                          Error(Blame::Caller,
                                "join: the ranks give different optimizers; give the same kinds, "
                                "of the same parameters in the same order, on all"));
  }
  join(static_cast<Joinable&>(model), steps, options);
}

void join(shard::ShardedRoot& model, torch::optim::Optimizer& optimizer,
          const std::function<void()>& steps, JoinOptions options) {
  join(model, std::vector<torch::optim::Optimizer*>{&optimizer}, steps, options);
}

}  // namespace weft
