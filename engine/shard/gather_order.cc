// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/shard/gather_order.h>

namespace weft::shard {

void GatherOrder::begin() {
  if (!present_.empty() && (recorded_.empty() || differs_ || position_ < recorded_.size()))
    recorded_ = std::move(present_);
  present_.clear();
  position_ = 0;
  differs_ = false;
}

bool GatherOrder::step(std::size_t unit) {
  present_.push_back(unit);
  if (recorded_.empty()) return true;
  if (position_ < recorded_.size() && recorded_[position_] == unit) {
    ++position_;
    return true;
  }
  differs_ = true;
  // The record goes on behind the next use of the unit, if there is one.
  const auto begin = recorded_.begin() + static_cast<std::ptrdiff_t>(position_);
  const auto found = std::find(begin, recorded_.end(), unit);
  if (found != recorded_.end()) position_ = static_cast<std::size_t>(found - recorded_.begin()) + 1;
  return false;
}

std::vector<std::size_t> GatherOrder::next(std::size_t count) const {
  std::vector<std::size_t> units;
  for (std::size_t i = position_; i < recorded_.size() && units.size() < count; ++i) {
    const std::size_t unit = recorded_[i];
    const bool is_present = !present_.empty() && present_.back() == unit;
    if (!is_present && std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  }
  return units;
}

}  // namespace weft::shard
