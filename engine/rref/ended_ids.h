// SPDX-License-Identifier: Apache-2.0
// The forks and values that have ended lately; late or retried messages about them change nothing.
// Ids of forks and of values are never the same. Not thread-safe: Values locks.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_set>
#include <utility>

#include <weft/base/deadline.h>

namespace weft::rref {

class EndedIds {
 public:
  // Forgets those that ended longer ago than any message about them is retried or on its way.
  void add(std::uint64_t id);
  bool contains(std::uint64_t id) const { return ended_.contains(id); }

 private:
  std::unordered_set<std::uint64_t> ended_;
  std::deque<std::pair<Deadline::Clock::time_point, std::uint64_t>> in_order_;  // oldest first
};

}  // namespace weft::rref
