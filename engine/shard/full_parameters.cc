// SPDX-License-Identifier: Apache-2.0
#include <unordered_map>
#include <unordered_set>

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/shard/fully_shard.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit_choice.h>

namespace weft {

struct FullParameters::State {
  struct Swapped {
    std::shared_ptr<torch::nn::Module> holder;
    torch::nn::Module* module;
    std::string key;
    at::Tensor shard, whole;
    std::shared_ptr<shard::Unit> unit;
    std::size_t place;
  };
  std::vector<Swapped> swapped;
  std::vector<std::shared_ptr<shard::Unit>> units;
  bool writable = false;

  static void keep_rows(const Swapped& item) noexcept {
    const shard::UnitParameter& parameter = item.unit->parameters()[item.place];
    const auto failure = group::error_of([&] {
      if (item.whole.sizes() != at::IntArrayRef(parameter.sizes)) {
        throw Error(Blame::Caller, "it has another shape now; change values, not shapes");
      }
      item.shard.copy_(item.unit->rows_of_whole(item.place, item.whole));
    });
    if (failure) {
      log::error("FullParameters: parameter '" + parameter.name +
                 "' keeps the values that it had: " + failure->text());
    }
  }

  // An optimizer that was made of the whole parameters would step nothing from now on.
  static void refuse_later_use(const Swapped& item) noexcept {
    if (item.whole.use_count() == 1) return;
    const std::string& name = item.unit->parameters()[item.place].name;
    const auto failure = group::error_of([&] {
      shard::refuse_gradient(item.whole, "the whole parameter '" + name +
                                             "' is that of a weft::FullParameters which is gone; "
                                             "make optimizers of model->parameters() outside of "
                                             "weft::FullParameters");
    });
    if (failure) log::error("FullParameters: " + failure->text());
  }

  void end() noexcept {
    const c10::AutoGradMode no_grad(false);
    std::unordered_set<const void*> written;
    for (const Swapped& item : swapped) {
      if (writable && written.insert(item.shard.unsafeGetTensorImpl()).second) keep_rows(item);
      item.shard.set_requires_grad(item.whole.requires_grad());
      shard::parameter_entry(*item.module, item.key) = item.shard;
      refuse_later_use(item);
    }
    for (const auto& unit : units) unit->let_go();
  }
};

FullParameters::FullParameters(torch::nn::Module& model, bool writable)
    : state_(std::make_unique<State>()) {
  const c10::AutoGradMode no_grad(false);
  auto units = shard::units_in(model);
  if (!units.empty() && parallel::detail::JoinScope::is_on_this_thread()) {
    throw Error(Blame::Caller,
                "FullParameters inside of weft::join, where ranks that have run out do not gather "
                "with this one; read the parameters behind the join");
  }
  for (const auto& unit : units) {
    if (!unit->is_held()) unit->shards();  // or throws
    unit->start_hold();
  }
  try {
    for (const auto& unit : units) {
      unit->hold();
      state_->units.push_back(unit);
    }
    std::unordered_map<const shard::Unit*, std::vector<at::Tensor>> whole;
    for (const auto& unit : units) whole[unit.get()] = unit->whole_values();
    for (const shard::ParameterPlace& place : shard::places_in(model)) {
      const auto [unit, index] = shard::owner_of(place.tensor);
      if (!unit) continue;
      at::Tensor& full = whole[unit.get()][index];
      full.set_requires_grad(place.tensor.requires_grad());
      state_->swapped.push_back(
          {place.holder, place.module, place.key, place.tensor, full, unit, index});
      shard::parameter_entry(*place.module, place.key) = full;
    }
  } catch (...) {
    state_->end();
    throw;
  }
  state_->writable = writable;
}

FullParameters::~FullParameters() { state_->end(); }

}  // namespace weft
