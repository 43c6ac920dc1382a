// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <sstream>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/serialize/archive.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/ddp/flat.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/ddp/parameter_check.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/objects.h>
#include <weft/engine/tensor/shard_mark.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/zero/partition.h>
#include <weft/engine/zero/zero.h>
#include <weft/engine/zero/zero_overlap.h>

namespace weft::parallel {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

void* key_of(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl(); }

// NaN if a program's own options have no learning rate.
double rate_of(const OptimizerParamGroup& group) {
  try {
    return group.options().get_lr();
  } catch (const c10::Error&) {
    return std::numeric_limits<double>::quiet_NaN();
  }
}

// A sparse gradient stays the average that its owner has.
enum class Gradient { None, Dense, Sparse };
Gradient kind_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return Gradient::None;
  return gradient.layout() == at::kStrided ? Gradient::Dense : Gradient::Sparse;
}

// Makes the values, back to back in `flat`, the gradients of the parameters.
void take_gradients(const at::Tensor& flat, const std::vector<at::Tensor>& parameters) {
  std::int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (kind_of(gradient) != Gradient::Dense) gradient = at::empty_like(parameter);
    gradient.copy_(flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

at::Tensor bytes_of(const Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  std::string text = stream.str();
  return at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())},
                       at::TensorOptions(at::kByte))
      .clone();
}

// Loads the state that rank `from` has sent.
void load_bytes(Optimizer& optimizer, const at::Tensor& bytes, c10::Device device, int from) {
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                      static_cast<std::size_t>(bytes.numel()), device);
    optimizer.load(archive);
  } catch (const std::exception& error) {
    throw Error(Blame::Remote, "consolidate_state_dict: the state of rank " + std::to_string(from) +
                                   " cannot be read: " + tensor::text_of(error));
  }
}

// Moves one parameter's state, or erases it in `to` if there is none.
void move_state(Optimizer& from, const at::Tensor& parameter, Optimizer& to) {
  const auto found = from.state().find(key_of(parameter));
  if (found == from.state().end()) {
    to.state().erase(key_of(parameter));
  } else {
    to.state()[key_of(parameter)] = std::move(found->second);
  }
}

// Collective. A step copies the owner's values to the other ranks by a parameter's place in the
// list. If ranks listed parameters of one shape in different orders, it would copy one parameter's
// values into another. Only parameters in host memory are checked, as ParameterCheck does.
void warn_of_other_values(ProcessGroup& group, const std::vector<NamedTensor>& named) {
  if (group.size() == 1) return;
  std::vector<double> sums;
  std::vector<std::string> names;
  for (const NamedTensor& item : named) {
    if (!item.tensor.is_cpu()) continue;
    try {
      const auto [values, magnitudes] = ParameterCheck::sums_of(item.tensor);
      sums.insert(sums.end(), {values, magnitudes});
    } catch (const c10::Error&) {
      continue;  // libtorch has no sum of this dtype, on any rank
    }
    names.push_back(item.name);
  }
  const auto* const bytes = reinterpret_cast<const char*>(sums.data());
  if (is_same_on_all(group, std::string(bytes, sums.size() * sizeof(double)))) return;
  const auto of_rank_0 = broadcast_object(sums, 0, group);
  std::string first;
  for (std::size_t i = 0; first.empty() && i < names.size() && sums.size() == of_rank_0.size();
       ++i) {
    const ParameterCheck::Sums here{sums[2 * i], sums[2 * i + 1]};
    const ParameterCheck::Sums there{of_rank_0[2 * i], of_rank_0[2 * i + 1]};
    if (ParameterCheck::differ(here, there)) first = names[i];
  }
  const auto all = gather_object(first, 0, group);  // rank 0's is empty
  const auto differing =
      std::ranges::find_if(all, [](const std::string& name) { return !name.empty(); });
  if (differing == all.end()) return;
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == *differing) ranks.push_back(static_cast<int>(rank));
  }
  log::warn("ZeroRedundancyOptimizer: " + std::string(ParameterCheck::kWarning) + ": " +
            *differing + " of " + ranks_text(ranks) +
            " does not have rank 0's values. Each step copies the values of a parameter's owner to "
            "all ranks, by its place in the list: give all ranks the parameters in one order, "
            "after DistributedDataParallel, or a broadcast, has made them equal");
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const Groups& groups, ProcessGroup group, const Make& make,
                                   ZeroOptions options)
    // The defaults as an optimizer of this kind understands the options that it is given.
    : Optimizer(groups, make({})->defaults().clone()),
      group_(std::move(group)),
      make_(make),
      options_(options),
      loads_(static_cast<std::size_t>(group_.size())) {
  lay_out(0);
}

ShardedOptimizer::~ShardedOptimizer() = default;

void ShardedOptimizer::add_param_group(const OptimizerParamGroup& group) {
  check_stepped("add_param_group");
  Optimizer::add_param_group(group);
  try {
    lay_out(param_groups_.size() - 1);
  } catch (...) {
    param_groups_.pop_back();
    throw;
  }
}

// --- the layout

// Shards are laid out in rounds of one shard for each rank: while the shards of one round travel,
// every rank steps its own shard of the next.
void ShardedOptimizer::lay_out(std::size_t first_group) {
  std::vector<NamedTensor> named;
  std::unordered_map<const void*, int> owners = owners_;
  for (std::size_t g = first_group; g < param_groups_.size(); ++g) {
    for (const at::Tensor& parameter : param_groups_[g].params()) {
      named.push_back(
          {"group " + std::to_string(g) + " parameter " + std::to_string(named.size()), parameter});
      if (is_shard(parameter)) {
        throw Error(Blame::Caller,
                    "ZeroRedundancyOptimizer: " + named.back().name +
                        " is sharded, and each rank has other rows of it; use a torch::optim "
                        "optimizer, whose state is spread over the ranks as the parameters are");
      }
      if (owners.emplace(key_of(parameter), -1).second) continue;
      throw Error(Blame::Caller, "ZeroRedundancyOptimizer: " + named.back().name +
                                     " is listed twice; give each once (a module's parameters() "
                                     "lists a weight that its parts share under every name)");
    }
  }
  const std::string options = "ZeroOptions::shard_bytes " + std::to_string(options_.shard_bytes) +
                              "\nZeroOptions::parameters_as_bucket_view " +
                              (options_.parameters_as_bucket_view ? "true" : "false") + "\n";
  on_all_ranks(group_, "ZeroRedundancyOptimizer",
               first_group == 0 ? "its constructor" : "add_param_group", [&] {
                 check_same_model(group_, named, options);
                 warn_of_other_values(group_, named);
               });
  if (options_.shard_bytes == 0)
    throw Error(Blame::Caller, "ZeroOptions::shard_bytes must be positive");
  all_.reset();
  std::vector<std::size_t> loads = loads_;
  std::vector<Shard> made;  // kept all or none: an optimizer's constructor may throw
  for (std::size_t g = first_group; g < param_groups_.size(); ++g) {
    const auto& parameters = param_groups_[g].params();
    std::vector<std::size_t> sizes;
    for (const at::Tensor& parameter : parameters) sizes.push_back(parameter.nbytes());
    const std::vector<int> ranks = deal_balanced(sizes, loads);
    std::vector<std::vector<at::Tensor>> by_rank(loads.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      owners[key_of(parameters[i])] = ranks[i];
      by_rank[static_cast<std::size_t>(ranks[i])].push_back(parameters[i]);
    }
    std::vector<std::vector<std::vector<at::Tensor>>> pieces;
    std::size_t rounds = 0;
    for (const auto& some : by_rank) {
      pieces.push_back(pieces_of(some, options_.shard_bytes));
      rounds = std::max(rounds, pieces.back().size());
    }
    for (std::size_t round = 0; round < rounds; ++round) {
      for (std::size_t rank = 0; rank < pieces.size(); ++rank) {
        if (round < pieces[rank].size())
          made.push_back(make_shard(g, static_cast<int>(rank), pieces[rank][round]));
      }
    }
  }
  shards_.insert(shards_.end(), std::make_move_iterator(made.begin()),
                 std::make_move_iterator(made.end()));
  loads_ = std::move(loads);
  owners_ = std::move(owners);
}

Shard ShardedOptimizer::make_shard(std::size_t group, int owner,
                                   std::vector<at::Tensor> parameters) const {
  Shard shard;
  shard.group = group;
  shard.owner = owner;
  shard.parameters = std::move(parameters);
  if (options_.parameters_as_bucket_view) {
    const c10::AutoGradMode no_grad(false);
    shard.flat = empty_flat(shard.parameters);
    std::int64_t offset = 0;
    for (at::Tensor& parameter : shard.parameters) {
      at::Tensor view = view_like(shard.flat, offset, parameter);
      view.copy_(parameter);
      parameter.set_data(view);
      offset += parameter.numel();
    }
  }
  if (owner == group_.rank()) {
    shard.optimizer =
        make_({OptimizerParamGroup(shard.parameters, param_groups_[group].options().clone())});
  }
  return shard;
}

// libtorch can change a parameter list, or a parameter's memory, without calling this class.
void ShardedOptimizer::check_layout() const {
  std::size_t count = 0;
  for (const OptimizerParamGroup& group : param_groups_) count += group.params().size();
  if (count != owners_.size()) {
    throw Error(Blame::Caller,
                "ZeroRedundancyOptimizer: its parameter groups were changed without it, so no rank "
                "owns the added parameters; call add_param_group() of the ZeroRedundancyOptimizer "
                "itself: libtorch's is not virtual, so calls through a torch::optim::Optimizer& "
                "and add_parameters() do not reach it");
  }
  for (const Shard& shard : shards_) {
    if (!shard.flat.defined()) continue;
    for (const at::Tensor& parameter : shard.parameters) {
      if (parameter.is_alias_of(shard.flat)) continue;
      throw Error(Blame::Caller,
                  "ZeroRedundancyOptimizer: a parameter was given other memory after it became a "
                  "view of a bucket; move the "
                  "module first, or leave parameters_as_bucket_view off");
    }
  }
}

const ProcessGroup& ShardedOptimizer::group_of_steps() const {
  if (overlap_) {
    throw Error(Blame::Caller,
                "ZeroRedundancyOptimizer: overlap_with() makes steps during backward, before "
                "gradients can be unscaled; use GradScaler without overlap_with()");
  }
  return group_;
}

int ShardedOptimizer::owner(const at::Tensor& parameter) const {
  const auto found = parameter.defined() ? owners_.find(key_of(parameter)) : owners_.end();
  if (found == owners_.end())
    throw Error(Blame::Caller, "ZeroRedundancyOptimizer: owner() of a parameter it was not given");
  return found->second;
}

std::vector<const Optimizer*> ShardedOptimizer::local_optimizers() const {
  std::vector<const Optimizer*> mine;
  for (const Shard& shard : shards_) {
    if (shard.optimizer) mine.push_back(shard.optimizer.get());
  }
  return mine;
}

// --- the step

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode with_grad(true);
    loss = closure();
  }
  if (join_scope_ != nullptr) {
    join_scope_->announce_step(*this, true);
    hand_over(active_, join_scope_->first_active_rank());
  }
  step_shards();
  return loss;
}

void ShardedOptimizer::hand_over(const std::vector<bool>& active, int leader) {
  const c10::AutoGradMode no_grad(false);
  const bool leads = group_.rank() == leader;
  std::vector<Shard*> handed;
  std::vector<double> facts;  // of each shard: its rate, and which gradients are handed over
  for (Shard& shard : shards_) {
    if (active[static_cast<std::size_t>(shard.owner)]) continue;
    handed.push_back(&shard);
    facts.push_back(rate_of(param_groups_[shard.group]));
    for (const at::Tensor& parameter : shard.parameters)
      facts.push_back(static_cast<double>(kind_of(parameter.grad())));
  }
  if (handed.empty()) return;
  const group::CalledBy by("ZeroRedundancyOptimizer, for ranks that have run out");
  at::Tensor sent = at::tensor(facts, at::kDouble).to(group::host_values_device(group_));
  group_.broadcast(sent, leader).wait();
  sent = sent.to(at::kCPU);
  const double* fact = sent.const_data_ptr<double>();
  for (Shard* const shard : handed) {
    const double rate = *fact++;
    std::vector<at::Tensor> pieces;
    std::vector<at::Tensor> dense;
    for (const at::Tensor& parameter : shard->parameters) {
      const auto kind = static_cast<Gradient>(static_cast<int>(*fact++));
      if (kind == Gradient::None && is_mine(*shard)) parameter.mutable_grad().reset();
      if (kind != Gradient::Dense) continue;
      dense.push_back(parameter);
      if (leads) pieces.push_back(parameter.grad().reshape({-1}));
    }
    if (is_mine(*shard) && !std::isnan(rate)) param_groups_[shard->group].options().set_lr(rate);
    if (dense.empty()) continue;
    at::Tensor flat = leads ? at::cat(pieces) : empty_flat(dense);
    group_.broadcast(flat, leader).wait();
    if (is_mine(*shard)) take_gradients(flat, dense);
  }
}

void ShardedOptimizer::step_shards() {
  check_layout();
  all_.reset();
  const std::vector<bool> stepped = overlap_ ? overlap_->complete() : std::vector<bool>();
  struct UnderWay {
    Shard* shard;
    at::Tensor flat;
    Work work;
  };
  std::vector<UnderWay> under_way;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (!stepped.empty() && stepped[i]) continue;
    Shard& shard = shards_[i];
    if (shard.optimizer) step_own(shard);
    if (group_.size() == 1) continue;
    at::Tensor flat = shard.travelling();
    const group::CalledBy by("ZeroRedundancyOptimizer");
    under_way.push_back({&shard, flat, group_.broadcast(flat, shard.owner)});
  }
  for (UnderWay& one : under_way) {
    one.work.wait();
    if (!is_mine(*one.shard)) Shard::land(one.flat, one.shard->parameters);
  }
}

void ShardedOptimizer::prepare_step(Shard& shard) const {
  shard.optimizer->param_groups().front().set_options(param_groups_[shard.group].options().clone());
}

// If the step throws, aborts the group: the other ranks wait for this rank's values and for the
// operations behind them.
void ShardedOptimizer::step_own(Shard& shard) {
  prepare_step(shard);
  try {
    shard.optimizer->step();
  } catch (const std::exception& error) {
    if (group_.size() > 1) group_.abort(kStepThrew + tensor::text_of(error));
    throw;
  } catch (...) {
    if (group_.size() > 1) group_.abort(std::string(kStepThrew) + "an exception without a text");
    throw;
  }
}

void ShardedOptimizer::mirror_step(const detail::JoinStep& step) {
  if (!step.synchronizes) return;
  hand_over(step.active, step.first_rank);
  step_shards();
}

// Every rank has the same parameters after every step, so there is nothing to take over.
void ShardedOptimizer::take_over(int) {}

// --- the state

std::unique_ptr<Optimizer> ShardedOptimizer::whole_with_local_state() const {
  auto whole = plain();
  whole->state().clear();
  for (const Shard& shard : shards_) {
    if (!shard.optimizer) continue;
    for (const auto& [parameter, state] : shard.optimizer->state())
      whole->state()[parameter] = state->clone();
  }
  return whole;
}

void ShardedOptimizer::consolidate_state_dict(int to) {
  check_stepped("consolidate_state_dict");
  group::check_rank(group_, to, "consolidate_state_dict");
  auto whole = whole_with_local_state();
  // Names and numbers take bytes besides the tensors. No optimizer of libtorch has more state than
  // this.
  std::int64_t most_expected = 64 << 20;
  for (const std::size_t bytes : loads_) most_expected += 64 * static_cast<std::int64_t>(bytes);
  const auto gathered =
      weft::detail::gather_ragged(bytes_of(*whole).to(group::barrier_device(group_)), to, group_,
                                  {"consolidate_state_dict: a rank's state", most_expected,
                                   "all ranks must wrap the same optimizer"});
  if (group_.rank() != to) return all_.reset();

  const c10::Device state_device =
      shards_.empty() ? c10::Device(c10::kCPU) : shards_.front().parameters.front().device();
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == to) continue;
    const auto other = make_(param_groups_);
    load_bytes(*other, gathered[static_cast<std::size_t>(rank)].to(at::kCPU), state_device, rank);
    for (const Shard& shard : shards_) {
      if (shard.owner != rank) continue;
      for (const at::Tensor& parameter : shard.parameters) move_state(*other, parameter, *whole);
    }
  }
  all_ = std::move(whole);
}

void ShardedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  if (!all_) {
    throw Error(Blame::Caller,
                "ZeroRedundancyOptimizer: this rank has only its part of the state; call "
                "consolidate_state_dict(rank) on all "
                "ranks after the last step, then save on that rank");
  }
  // A scheduler may have changed them since the state was collected.
  for (std::size_t g = 0; g < param_groups_.size(); ++g)
    all_->param_groups()[g].set_options(param_groups_[g].options().clone());
  all_->save(archive);
}

void ShardedOptimizer::load(torch::serialize::InputArchive& archive) {
  const auto whole = plain();
  whole->load(archive);
  take(*whole);
}

std::unique_ptr<Optimizer> ShardedOptimizer::plain() const {
  check_stepped("load");
  return make_(param_groups_);
}

void ShardedOptimizer::take(Optimizer& whole) {
  all_.reset();
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    param_groups_[g].set_options(whole.param_groups()[g].options().clone());
  }
  for (Shard& shard : shards_) {
    if (!shard.optimizer) continue;
    for (const at::Tensor& parameter : shard.parameters)
      move_state(whole, parameter, *shard.optimizer);
  }
}

}  // namespace weft::parallel
