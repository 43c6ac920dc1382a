// SPDX-License-Identifier: Apache-2.0
// Connections whose other ends have not said yet who they are, in the order in which they came. The
// one that has been silent longest is hardly a peer's, so it makes room for others. Not
// thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include <weft/base/deadline.h>

namespace weft {

// Strangers that are kept beside as many as there are peers.
constexpr std::size_t kMaxStrangers = 1024;
constexpr const char* kTooManyStrangers = "too many connections without a hello";
constexpr const char* kNoDescriptorForStrangers = "this process has no descriptor left for others";

template <class Connection>
class Strangers {
 public:
  explicit Strangers(std::size_t peers, std::size_t strangers = kMaxStrangers)
      : most_(peers + strangers) {}

  // Returns the connection that the caller closes, if there are too many.
  [[nodiscard]] std::optional<Connection> add(Connection one) {
    waiting_.push_back({std::move(one), Deadline::in(kRoom)});
    return waiting_.size() > most_ ? take_first() : std::nullopt;
  }
  // The process has no descriptor left. Returns the connection that the caller closes, if one has
  // waited for long.
  [[nodiscard]] std::optional<Connection> make_room() {
    const bool has_room = !waiting_.empty() && waiting_.front().makes_room.passed();
    return has_room ? take_first() : std::nullopt;
  }
  // Its peer is known, or it has ended. Returns false if it is not among them.
  bool remove(const Connection& one) {
    return std::erase_if(waiting_, [&](const Waiting& other) { return other.it == one; }) > 0;
  }
  bool is_empty() const { return waiting_.empty(); }
  std::deque<Connection> take_all() {
    std::deque<Connection> all;
    for (Waiting& one : waiting_) all.push_back(std::move(one.it));
    waiting_.clear();
    return all;
  }

 private:
  // One that has been here for so long makes room if the process has no descriptor left.
  static constexpr auto kRoom = std::chrono::seconds(1);
  struct Waiting {
    Connection it;
    Deadline makes_room;
  };
  std::optional<Connection> take_first() {
    std::optional<Connection> first(std::move(waiting_.front().it));
    waiting_.pop_front();
    return first;
  }

  const std::size_t most_;
  std::deque<Waiting> waiting_;
};

}  // namespace weft
