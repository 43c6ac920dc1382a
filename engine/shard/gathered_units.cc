// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/log.h>
#include <weft/engine/shard/gathered_units.h>

namespace weft::shard {

namespace {

bool contains(const std::vector<std::size_t>& all, std::size_t one) {
  return std::ranges::find(all, one) != all.end();
}

}  // namespace

GatheredUnits::GatheredUnits(std::vector<std::shared_ptr<Unit>> units, std::size_t prefetch)
    : units_(std::move(units)), prefetch_(prefetch), kept_(units_.size()) {}

void GatheredUnits::begin(Pass forward) {
  begins_ = true;
  drop();
  orders_[index_of(forward)].begin();
  if (forward == Pass::Forward) orders_[index_of(Pass::Backward)].begin();
}

void GatheredUnits::start_ahead(Pass pass) { start_ahead(orders_[index_of(pass)], {}); }

void GatheredUnits::end_forward(bool has_backward) {
  begins_ = true;
  if (has_backward) {
    std::vector<std::size_t> needed = present_;
    add_begin_of_backward(needed, present_.size() + prefetch_);
    free_unless(needed);
  } else {
    drop();
  }
}

void GatheredUnits::drop() {
  kept_.assign(units_.size(), false);
  present_.clear();
  free_unless({});
}

// The units that were used last in forward are there at the begin of backward.
bool GatheredUnits::are_ready(const std::vector<std::size_t>& used) const {
  return !begins_ && std::ranges::all_of(used, [&](std::size_t unit) {
    return contains(present_, unit) && units_[unit]->state() == Unit::State::Gathered;
  });
}

void GatheredUnits::gather(const std::vector<std::size_t>& used, Pass pass) {
  begins_ = false;
  GatherOrder& order = orders_[index_of(pass)];
  note_order(order, used);
  std::vector<std::size_t> needed = order.next(prefetch_);
  needed.insert(needed.end(), used.begin(), used.end());
  if (pass == Pass::Forward) add_begin_of_backward(needed, used.size() + prefetch_);
  present_ = used;
  free_unless(needed);
  for (const std::size_t unit : used) {
    if (pass == Pass::Forward && !units_[unit]->options().reshard_after_forward) kept_[unit] = true;
    start_gather(*units_[unit], /*is_ahead=*/false);
  }
  start_ahead(order, used);
  for (const std::size_t unit : used) units_[unit]->finish_gather();
}

void GatheredUnits::end_use(std::size_t unit) {
  kept_[unit] = false;
  std::erase(present_, unit);
  if (!units_[unit]->is_held()) units_[unit]->free();
}

void GatheredUnits::forget_orders() {
  for (GatherOrder& order : orders_) order = {};
}

void GatheredUnits::note_order(GatherOrder& order, const std::vector<std::size_t>& used) {
  bool is_as_recorded = true;
  for (const std::size_t unit : used) is_as_recorded &= order.step(unit);
  if (is_as_recorded || std::exchange(has_told_, true)) return;
  log::warn("FullyShardedDataParallel: unit '" + units_[used.front()]->name() +
            "' is used in another order than in the steps before. That works if it is so on all "
            "ranks, but units that were gathered ahead in vain cost time");
}

void GatheredUnits::add_begin_of_backward(std::vector<std::size_t>& needed,
                                          std::size_t most) const {
  for (const std::size_t unit : orders_[index_of(Pass::Backward)].next(most)) {
    if (needed.size() >= most) return;
    if (!contains(needed, unit)) needed.push_back(unit);
  }
}

void GatheredUnits::start_ahead(const GatherOrder& order, const std::vector<std::size_t>& used) {
  for (const std::size_t unit : order.next(prefetch_)) {
    if (!contains(used, unit)) start_gather(*units_[unit], /*is_ahead=*/true);
  }
  std::size_t bytes = 0;
  for (const auto& unit : units_) {
    if (unit->state() != Unit::State::Sharded) bytes += unit->bytes();
  }
  statistics_.most_bytes = std::max(statistics_.most_bytes, bytes);
}

void GatheredUnits::start_gather(Unit& unit, bool is_ahead) {
  if (unit.state() != Unit::State::Sharded) return;
  if (before_gather_) before_gather_(unit);
  unit.start_gather();
  ++statistics_.gathers;
  if (is_ahead) ++statistics_.ahead;
}

void GatheredUnits::free_unless(const std::vector<std::size_t>& needed) {
  for (const auto& unit : units_) {
    if (!kept_[unit->index] && !unit->is_held() && !contains(needed, unit->index)) unit->free();
  }
}

}  // namespace weft::shard
