// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <ATen/ops/zeros_like.h>

#include <weft/base/error.h>
#include <weft/engine/shard/kept_gradients.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::shard {

namespace {

// The tensor in memory of its own, to which later gradients may be added: the engine may give two
// views of one memory.
at::Tensor own(at::Tensor gradient) {
  const bool is_alone = gradient.use_count() == 1 && gradient.layout() == at::kStrided &&
                        gradient.is_non_overlapping_and_dense() &&
                        gradient.storage().use_count() == 1;
  return is_alone ? std::move(gradient) : gradient.clone();
}

}  // namespace

at::ScalarType reduced_in(const Unit& unit, const UnitParameter& parameter) {
  const at::ScalarType own = parameter.whole.scalar_type();
  return at::isFloatingType(own) ? unit.options().reduce_dtype.value_or(own) : own;
}

void KeptGradients::add(const Unit& unit, const std::vector<std::size_t>& parameters,
                        std::vector<at::Tensor>& gradients) {
  auto& all = units_[unit.index];
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    const UnitParameter& parameter = unit.parameters()[parameters[slot]];
    // A parameter without a gradient is kept too, so that all ranks keep the same parameters.
    auto kept = all.find(parameters[slot]);
    if (kept == all.end()) kept = all.emplace(parameters[slot], kept_for(parameter.shard())).first;
    at::Tensor& gradient = gradients[slot];
    if (!gradient.defined()) continue;
    at::Tensor added = std::exchange(gradient, {}).to(reduced_in(unit, parameter));
    at::Tensor& sum = kept->second.sum;
    if (!sum.defined()) {
      sum = own(std::move(added));
    } else {
      sum.add_(added);
    }
  }
}

bool KeptGradients::has_any() const {
  return std::ranges::any_of(units_, [](const auto& all) { return !all.empty(); });
}

bool KeptGradients::keeps(const Unit& unit, std::size_t parameter) const {
  const auto& all = units_[unit.index];
  const auto kept = all.find(parameter);
  return kept != all.end() && is_untouched(kept->second);
}

void KeptGradients::take(const Unit& unit, const std::vector<std::size_t>& parameters,
                         std::vector<at::Tensor>& gradients) {
  auto& all = units_[unit.index];
  if (all.empty()) return;
  add(unit, parameters, gradients);
  for (std::size_t slot = 0; slot < parameters.size(); ++slot)
    gradients[slot] = std::move(all.at(parameters[slot]).sum);
  for (const auto& [parameter, kept] : all) let_go(kept);
  all.clear();
}

void KeptGradients::drop_zeroed() {
  for (auto& all : units_) {
    std::erase_if(all, [](const auto& item) {
      const Kept& kept = item.second;
      if (is_untouched(kept)) return false;
      let_go(kept);
      return true;
    });
  }
}

void KeptGradients::drop_all() {
  for (auto& all : units_) {
    for (const auto& [parameter, kept] : all) let_go(kept);
    all.clear();
  }
}

void KeptGradients::require_trained(const std::vector<std::shared_ptr<Unit>>& units) const {
  for (const auto& unit : units) {
    for (const auto& [parameter, kept] : units_[unit->index]) {
      if (kept.shard.requires_grad()) continue;
      throw Error(Blame::Caller,
                  "requires_grad was switched off for parameter '" +
                      unit->parameters()[parameter].name +
                      "', whose gradient from no_sync() has not been averaged yet; let a backward "
                      "synchronise first, or drop the gradient (zero_grad)");
    }
  }
}

KeptGradients::Kept KeptGradients::kept_for(at::Tensor shard) {
  Kept kept;
  at::Tensor& gradient = shard.mutable_grad();
  if (!gradient.defined()) {
    gradient = at::zeros_like(shard);
    gradient.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<StandInMark>());
  }
  kept.gradient = gradient;
  kept.version = static_cast<std::uint32_t>(gradient._version());
  kept.shard = std::move(shard);
  return kept;
}

bool KeptGradients::is_untouched(const Kept& kept) {
  const at::Tensor& now = kept.shard.grad();
  return now.is_same(kept.gradient) && static_cast<std::uint32_t>(now._version()) == kept.version;
}

void KeptGradients::let_go(const Kept& kept) {
  at::Tensor& now = kept.shard.mutable_grad();
  if (!is_stand_in(now)) return;
  if (is_untouched(kept)) {
    now.reset();
  } else {
    now.unsafeGetTensorImpl()->set_backend_meta(nullptr);
  }
}

}  // namespace weft::shard
