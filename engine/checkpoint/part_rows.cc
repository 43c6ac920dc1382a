// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <utility>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/part_rows.h>
#include <weft/engine/checkpoint/part_values.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/objects.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::checkpoint {

namespace {

// The rows of sharded tensors, by name.
class Collected {
 public:
  explicit Collected(std::map<std::string, OwnRows>& rows) : rows_(rows) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto [unit, place] = shard::owner_of(tensor);
    if (!unit) return;
    if (checked_.insert(unit.get()).second && !unit->is_held()) unit->shards();  // checks them
    const shard::UnitParameter& parameter = unit->parameters()[place];
    OwnRows own;
    own.holder = unit->group().rank();
    own.holders = unit->group().size();
    own.group = unit->group();
    own.sizes = parameter.sizes;
    own.dtype = parameter.dtype;
    own.rows = parameter.rows(own.holder, own.holders);
    rows_.emplace(name, std::move(own));
  }

  void add_all(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& item : module.named_parameters(false))
      add(prefix + step_of(item.key()), item.value());
    for (const auto& item : module.named_children()) {
      if (item.value()->is_serializable())
        add_all(*item.value(), prefix + step_of(item.key()) + ".");
    }
  }

 private:
  std::map<std::string, OwnRows>& rows_;
  std::set<const shard::Unit*> checked_;
};

}  // namespace

std::vector<std::int64_t> sizes_in_file(const OwnRows& own, const std::string& kind) {
  std::vector<std::int64_t> sizes = own.sizes;
  if (kind == kComplex) sizes.push_back(2);
  return sizes;
}

bool has_shards(const Part& part) {
  const auto& content = Contents::of(part);
  std::vector<at::Tensor> parameters;
  if (const auto* const module = std::get_if<torch::nn::Module*>(&content)) {
    parameters = (*module)->parameters();
  } else if (const auto* const optimizer = std::get_if<torch::optim::Optimizer*>(&content)) {
    for (const auto& group : (*optimizer)->param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return std::ranges::any_of(parameters, is_shard);
}

PartRows::PartRows(const Part& part, const std::string& prefix) {
  // Each rank saves and loads what it has itself.
  if (Contents::is_per_rank(part)) return;
  Collected collected(rows_);
  const auto& content = Contents::of(part);
  if (const auto* const module = std::get_if<torch::nn::Module*>(&content)) {
    collected.add_all(**module, prefix + ".");
  } else if (const auto* const optimizer = std::get_if<torch::optim::Optimizer*>(&content)) {
    states_ = prefix + ".state.";
    std::size_t index = 0;
    for (const auto& group : (*optimizer)->param_groups()) {
      for (const at::Tensor& parameter : group.params())
        collected.add(states_ + std::to_string(index++), parameter);
    }
  }
}

const OwnRows* PartRows::of(const std::string& name) const {
  const std::string key = is_state(name) ? name.substr(0, name.find('.', states_.size())) : name;
  const auto found = rows_.find(key);
  return found == rows_.end() ? nullptr : &found->second;
}

void PartRows::mark(Value& value) const {
  const OwnRows* const own = of(value.name);
  if (own == nullptr) return;
  const bool is_scalar = own->sizes.empty();
  const std::vector<std::int64_t> sizes = sizes_in_file(*own, value.kind);
  std::vector<std::int64_t> shape = sizes;
  if (!is_scalar) shape.front() = own->rows.count;
  if (value.tensor.sizes() != at::IntArrayRef(shape)) {
    const bool is_tensor = value.kind.empty() || value.kind == kComplex;
    if (is_state(value.name) && own->holders > 1 && is_tensor && value.tensor.dim() > 0) {
      throw Error(
          Blame::Caller,
          "'" + value.name +
              "' is the optimizer's state of a sharded parameter and not of "
              "the parameter's shape, so the ranks' values cannot be put together; save_async "
              "cannot write this optimizer of a sharded model");
    }
    return;
  }
  // A scalar is on every rank, and of a value without elements no rank has rows.
  const bool has_rows = !is_scalar && std::ranges::find(sizes, 0) == sizes.end();
  value.writer = has_rows ? Writer::Own : Writer::First;
  if (!has_rows) {
    if (!is_scalar) value.tensor = value.tensor.new_empty(sizes);
    return;
  }
  value.rows = *own;
  value.rows->sizes = sizes;
}

void divide_equal_rows(std::vector<Value>& values, ProcessGroup& group) {
  std::vector<Value*> sharded;
  std::vector<int> holders;
  bool is_over_others = false;
  for (Value& value : values) {
    if (!value.rows) continue;
    sharded.push_back(&value);
    holders.push_back(value.rows->holder);
    is_over_others |= !group::are_same(value.rows->group, group);
  }
  if (!is_over_others) return;
  const auto all = all_gather_object(holders, group);
  for (std::size_t i = 0; i < sharded.size(); ++i) {
    OwnRows& rows = *sharded[i]->rows;
    std::vector<int> with_equal;  // the ranks that have the same rows
    std::set<int> present;
    for (int rank = 0; rank < group.size(); ++rank) {
      const int holder = all[static_cast<std::size_t>(rank)][i];
      present.insert(holder);
      if (holder == rows.holder) with_equal.push_back(rank);
    }
    if (static_cast<int>(present.size()) != rows.holders) {
      group::throw_together(
          group,
          Error(Blame::Caller, "'" + sharded[i]->name + "' is sharded over " +
                                   std::to_string(rows.holders) +
                                   " ranks, and only some of its rows are on ranks of this group; "
                                   "save by a group that has all of those ranks"));
    }
    const auto place = std::ranges::find(with_equal, group.rank()) - with_equal.begin();
    const shard::Rows part = shard::rows_of(rows.rows.count, static_cast<int>(place),
                                            static_cast<int>(with_equal.size()));
    sharded[i]->tensor = sharded[i]->tensor.narrow(0, part.first, part.count);
    rows.rows = {rows.rows.first + part.first, part.count};
  }
}

}  // namespace weft::checkpoint
