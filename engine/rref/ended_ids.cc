// SPDX-License-Identifier: Apache-2.0
#include <chrono>

#include <weft/engine/rref/ended_ids.h>

namespace weft::rref {

namespace {

// How long an owner remembers an ended fork: longer than any message about it is retried or on its
// way.
constexpr auto kRemember = std::chrono::minutes(1);
constexpr std::size_t kMostIds = 1 << 20;

}  // namespace

void EndedIds::add(std::uint64_t id) {
  if (!ended_.insert(id).second) return;
  const auto now = Deadline::Clock::now();
  in_order_.emplace_back(now, id);
  while (now - in_order_.front().first > kRemember || in_order_.size() > kMostIds) {
    ended_.erase(in_order_.front().second);
    in_order_.pop_front();
  }
}

}  // namespace weft::rref
