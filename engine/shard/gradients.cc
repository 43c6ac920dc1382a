// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/base/mutex.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/rows.h>
#include <weft/engine/shard/gradient_versions.h>
#include <weft/engine/shard/gradients.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::shard {

namespace {

using torch::autograd::variable_list;

// The engine runs nodes with greater numbers first, and as early as their inputs allow.
constexpr std::uint64_t kFirst = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kLast = 0;

// The reductions that a UnitNode has started and its ShardNode has not taken, by libtorch's number
// of the backward: one that failed leaves its own, and the graph may be used again.
class Started {
 public:
  void put(std::shared_ptr<Reduction> reduction) {
    MutexLock lock(mutex_);
    reductions_[torch::autograd::get_current_graph_task_id()] = std::move(reduction);
  }
  std::shared_ptr<Reduction> take() {
    MutexLock lock(mutex_);
    const auto found = reductions_.extract(torch::autograd::get_current_graph_task_id());
    return found ? found.mapped() : nullptr;
  }

 private:
  Mutex mutex_;
  std::map<int, std::shared_ptr<Reduction>> reductions_ WEFT_GUARDED_BY(mutex_);
};

// True if the engine or the program reads gradients on their way there, and not only after the
// backward.
bool reads_at_once(const torch::autograd::Edge& edge) {
  auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  return leaf == nullptr || leaf->variable.grad().defined() || !leaf->pre_hooks().empty() ||
         !leaf->tensor_pre_hooks().empty() ||
         !std::ranges::all_of(leaf->post_hooks(),
                              [](const auto& hook) { return only_notes(*hook); }) ||
         leaf->tensor_post_acc_grad_hooks() != nullptr ||
         !torch::autograd::impl::hooks(leaf->variable).empty();
}

class ShardNode final : public torch::autograd::Node {
 public:
  ShardNode(std::shared_ptr<Started> started, std::vector<at::ScalarType> dtypes)
      : Node(kLast), started_(std::move(started)), dtypes_(std::move(dtypes)) {}
  std::string name() const override { return "weft::FullyShardedDataParallel::Shards"; }
  variable_list apply(variable_list&& gradients) override {
    const auto reduction = started_->take();
    if (reduction == nullptr) return variable_list(gradients.size());
    reduction->wait();
    reduction->finish(gradients, dtypes_);
    if (std::ranges::any_of(next_edges(), &reads_at_once)) reduction->wait_for_host();
    return std::move(gradients);
  }

 private:
  const std::shared_ptr<Started> started_;
  const std::vector<at::ScalarType> dtypes_;  // of the shards
};

class UnitNode final : public torch::autograd::Node {
 public:
  // `version`: of the shards in the forward.
  UnitNode(Unit& unit, std::vector<std::size_t> parameters, std::uint64_t version,
           bool synchronizes, std::shared_ptr<Started> started)
      : Node(kFirst),
        unit_(unit.weak_from_this()),
        name_(unit.name()),
        parameters_(std::move(parameters)),
        version_(version),
        synchronizes_(synchronizes),
        started_(std::move(started)) {}
  std::string name() const override { return "weft::FullyShardedDataParallel::Unit"; }
  variable_list apply(variable_list&& gradients) override {
    const auto unit = unit_.lock();
    const auto model = unit ? unit->model.lock() : nullptr;
    if (!model) {
      throw Error(Blame::Caller,
                  "the FullyShardedDataParallel of unit '" + name_ +
                      "' was destroyed before the backward of its forward; it must outlive it");
    }
    if (autograd::Pass::current() != nullptr) throw ShardedModel::refused_context();
    // One rank may run such a backward alone, which must not begin a collective.
    if (unit->is_held()) {
      throw Error(Blame::Caller, "a backward reaches the parameters of unit '" + name_ +
                                     "' while FullParameters lives; destroy that first, and run "
                                     "the forward through the FullyShardedDataParallel");
    }
    model->require_version(*unit, version_);
    if (c10::GradMode::is_enabled()) {
      throw Error(Blame::Caller,
                  "a backward with create_graph reaches the parameters of unit '" + name_ +
                      "', which are sharded: their gradients are averaged by a collective that has "
                      "no gradient itself; leave create_graph out, or ask torch::autograd::grad() "
                      "for gradients of inputs only");
    }
    variable_list outputs(gradients.size());
    auto reduction =
        model->take_gradients(*unit, parameters_, synchronizes_, std::move(gradients), outputs);
    if (!reduction) return outputs;
    // The engine then reads what each node returns, to look for NaN.
    if (torch::autograd::AnomalyMode::is_enabled()) reduction->wait();
    started_->put(std::move(reduction));
    return outputs;
  }

 private:
  const std::weak_ptr<Unit> unit_;
  const std::string name_;
  const std::vector<std::size_t> parameters_;
  const std::uint64_t version_;
  const bool synchronizes_;
  const std::shared_ptr<Started> started_;
};

// A tensor of that shape that has one element's memory: for the engine's checks.
at::Tensor example(const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                   c10::Device device) {
  return at::empty_strided(shape, std::vector<std::int64_t>(shape.size(), 0),
                           at::TensorOptions(dtype).device(device));
}

// Lays gradients out for a reduce-scatter: for each rank its rows of each slot, and then one number
// for each slot.
class Packing {
 public:
  Packing(const Unit& unit, const std::vector<std::size_t>& parameters, Reduction::Bucket& bucket)
      : unit_(unit),
        parameters_(parameters),
        bucket_(bucket),
        rank_(unit.group().rank()),
        ranks_(unit.group().size()) {
    for (int rank = 0; rank < ranks_; ++rank) {
      begins_.push_back(total_);
      for (const std::size_t slot : bucket.slots) total_ += elements(slot, rank);
      total_ += static_cast<std::int64_t>(bucket.slots.size());
    }
    begins_.push_back(total_);
  }

  // Writes gradients divided by the number of ranks, zeros for undefined ones, in the order of
  // operations of DistributedDataParallel, which gives the same bits.
  at::Tensor pack(const std::vector<at::Tensor>& gradients) const {
    const at::Tensor flat = transient(unit_, total_, bucket_.dtype);
    const int averaged = unit_.divisor > 0 ? unit_.divisor : unit_.ranks().count();
    const double factor = 1.0 / averaged;
    std::vector<at::Tensor> to, from;  // what is copied and then divided, by one kernel each
    for (int rank = 0; rank < ranks_; ++rank) {
      std::int64_t offset = begins_[static_cast<std::size_t>(rank)];
      for (const std::size_t slot : bucket_.slots) {
        at::Tensor place = rows_in(flat, slot, rank, offset);
        offset += place.numel();
        if (!gradients[slot].defined()) place.zero_();
        if (!gradients[slot].defined() || place.numel() == 0) continue;
        const at::Tensor part = rows_of_gradient(gradients[slot], slot, rank);
        if (unit_.device().is_cpu() && averaged > 1 && part.scalar_type() == bucket_.dtype) {
          at::mul_out(place, part, at::native::wrapped_scalar_tensor(factor));
        } else {
          to.push_back(place);
          from.push_back(part);
        }
      }
    }
    if (!to.empty()) at::_foreach_copy_(to, from);
    if (!to.empty() && averaged > 1) at::_foreach_mul_(to, factor);
    note_used(flat, gradients);
    return flat;
  }

  void start(const at::Tensor& flat) {
    std::vector<std::int64_t> elements;
    for (std::size_t rank = 0; rank + 1 < begins_.size(); ++rank)
      elements.push_back(begins_[rank + 1] - begins_[rank]);
    bucket_.output = at::empty({elements[static_cast<std::size_t>(rank_)]}, flat.options());
    const at::Tensor lent = bucket_.lent.lend(bucket_.output);
    bucket_.shown = unit_.offloads() ? lent : bucket_.output;
    const group::CalledBy by(unit_.called_by);
    bucket_.work =
        group::reduce_scatter_rows(unit_.group(), lent, bucket_.lent.lend(flat), elements,
                                   "gradients of unit '" + unit_.name() + "'", {0, unit_.number()});
  }

  void show_outputs(std::vector<at::Tensor>& outputs) const {
    std::int64_t offset = 0;
    for (const std::size_t slot : bucket_.slots) {
      outputs[slot] = rows_in(bucket_.shown, slot, rank_, offset);
      offset += outputs[slot].numel();
    }
  }

 private:
  const UnitParameter& parameter(std::size_t slot) const {
    return unit_.parameters()[parameters_[slot]];
  }
  std::int64_t elements(std::size_t slot, int rank) const {
    return parameter(slot).rows(rank, ranks_).count * parameter(slot).row_elements;
  }
  at::Tensor rows_of_gradient(const at::Tensor& gradient, std::size_t slot, int rank) const {
    if (parameter(slot).is_scalar) return gradient;
    const Rows rows = parameter(slot).rows(rank, ranks_);
    return gradient.narrow(0, rows.first, rows.count);
  }
  // Writes for each slot, behind each rank's rows, whether this rank has a gradient.
  void note_used(const at::Tensor& flat, const std::vector<at::Tensor>& gradients) const {
    const auto count = static_cast<std::int64_t>(bucket_.slots.size());
    at::Tensor used = at::ones({count}, at::TensorOptions(bucket_.dtype));
    bool all = true;
    for (std::int64_t i = 0; i < count; ++i) {
      if (gradients[bucket_.slots[static_cast<std::size_t>(i)]].defined()) continue;
      used[i] = 0;
      all = false;
    }
    for (std::size_t rank = 1; rank < begins_.size(); ++rank) {
      at::Tensor place = flat.narrow(0, begins_[rank] - count, count);
      if (all) {
        place.fill_(1);
      } else {
        place.copy_(used);
      }
    }
  }
  // Autograd does not know it as a view: see parallel::view_like().
  at::Tensor rows_in(const at::Tensor& flat, std::size_t slot, int rank,
                     std::int64_t offset) const {
    const at::AutoDispatchBelowADInplaceOrView untracked;
    const auto shape = parameter(slot).shape(parameter(slot).rows(rank, ranks_).count);
    return flat.as_strided(shape, parameter(slot).strides, offset);
  }

  const Unit& unit_;
  const std::vector<std::size_t>& parameters_;
  Reduction::Bucket& bucket_;
  const int rank_, ranks_;
  std::vector<std::int64_t> begins_;  // by rank, in elements
  std::int64_t total_ = 0;
};

// A member that becomes a leaf would keep its whole gradient on each rank.
void require_frozen(const UnitParameter& parameter) {
  if (!parameter.whole.requires_grad()) return;
  throw Error(Blame::Caller,
              "requires_grad was switched on for the module's member of parameter '" +
                  parameter.name +
                  "', which is sharded; call requires_grad_() of its shard, which "
                  "model->parameters() has");
}

// Hooks of a member are lost with the node that they were registered on.
void refuse_hooks(const UnitParameter& parameter) {
  if (!has_hooks(parameter.whole)) return;
  throw Error(Blame::Caller,
              "a hook was registered on the module's member of parameter '" + parameter.name +
                  "', which is sharded and has no whole gradient; register it on its shard, which "
                  "model->parameters() has");
}

}  // namespace

void attach_nodes(Unit& unit, const std::vector<at::Tensor>& shards, std::uint64_t version,
                  bool synchronizes) {
  std::vector<std::size_t> trained;
  std::vector<at::ScalarType> dtypes;
  for (std::size_t i = 0; i < unit.parameters().size(); ++i) {
    const UnitParameter& parameter = unit.parameters()[i];
    refuse_hooks(parameter);
    if (!shards[i].requires_grad()) {
      torch::autograd::impl::set_gradient_edge(parameter.whole, {});
      require_frozen(parameter);
    } else {
      trained.push_back(i);
      dtypes.push_back(parameter.dtype);
    }
  }
  if (trained.empty()) return;
  auto started = std::make_shared<Started>();
  const auto node = make_node<ShardNode>(started, std::move(dtypes));
  const auto whole = make_node<UnitNode>(unit, trained, version, synchronizes, std::move(started));
  for (const std::size_t i : trained) {
    const UnitParameter& parameter = unit.parameters()[i];
    node->add_input_metadata(
        example(shards[i].sizes().vec(), reduced_in(unit, parameter), unit.device()));
    node->add_next_edge(torch::autograd::impl::gradient_edge(shards[i]));
  }
  for (std::uint32_t slot = 0; slot < trained.size(); ++slot) whole->add_next_edge({node, slot});
  for (std::uint32_t slot = 0; slot < trained.size(); ++slot) {
    const at::Tensor& tensor = unit.parameters()[trained[slot]].whole;
    whole->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {whole, slot});
  }
}

void detach_nodes(Unit& unit) {
  for (const UnitParameter& parameter : unit.parameters())
    torch::autograd::impl::set_gradient_edge(parameter.whole, {});
}

// All units of a model are spread over the same ranks.
GradientReducer::GradientReducer(const std::vector<std::shared_ptr<Unit>>& units)
    : kept_(units.size()), order_(ReductionOrder::over(units.front()->ranks().replicas)) {}

void require_dense(const Unit& unit, const std::vector<std::size_t>& parameters,
                   const std::vector<at::Tensor>& gradients) {
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    if (!gradients[slot].defined() || gradients[slot].layout() == at::kStrided) continue;
    throw Error(Blame::Caller, "the gradient of parameter '" +
                                   unit.parameters()[parameters[slot]].name +
                                   "' is sparse, and sharded parameters take dense gradients "
                                   "only; use torch::nn::Embedding without sparse(true)");
  }
}

std::shared_ptr<Reduction> GradientReducer::reduce(const Unit& unit,
                                                   const std::vector<std::size_t>& parameters,
                                                   std::vector<at::Tensor> gradients,
                                                   std::vector<at::Tensor>& outputs) {
  kept_.take(unit, parameters, gradients);
  auto reduction = std::make_shared<Reduction>();
  reduction->order = order_;
  reduction->unit = unit.number();
  if (unit.offloads()) reduction->offload = unit.offload;
  reduction->called_by = unit.called_by;
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    const UnitParameter& parameter = unit.parameters()[parameters[slot]];
    reduction->came.push_back(gradients[slot].defined());
    const at::ScalarType dtype = reduced_in(unit, parameter);
    auto bucket = std::ranges::find(reduction->buckets, dtype, &Reduction::Bucket::dtype);
    if (bucket == reduction->buckets.end()) {
      reduction->buckets.push_back(
          {.dtype = dtype, .slots = {}, .output = {}, .work = {}, .kept_as = parameter.dtype});
      bucket = reduction->buckets.end() - 1;
    }
    if (bucket->kept_as != parameter.dtype) bucket->kept_as = dtype;
    bucket->slots.push_back(slot);
  }
  for (Reduction::Bucket& bucket : reduction->buckets) {
    Packing packing(unit, parameters, bucket);
    packing.start(packing.pack(gradients));
    for (const std::size_t slot : bucket.slots) gradients[slot].reset();
    packing.show_outputs(outputs);
  }
  order_->add(reduction);
  return reduction;
}

}  // namespace weft::shard
