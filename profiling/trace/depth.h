// SPDX-License-Identifier: Apache-2.0
// The depths of this process's queues, for the metrics. The owner of each queue keeps its depth up
// to date.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace weft::trace {

enum class Queue : std::uint8_t {
  Calls,  // calls made here and unanswered; `of` is the worker that is called
  // Incoming calls, and continuations, for which no thread is free yet; `of` is the agent.
  Handlers,
  // Messages that a connection has accepted and not sent yet; `of` is the transport.
  Messages,
};

struct Depth {
  Queue queue;
  std::string of;
  std::atomic<std::int64_t> now{0};
  void add(std::int64_t change) noexcept { now.fetch_add(change, std::memory_order_relaxed); }
};

// Returns the depth of that queue and name, and makes it if it does not exist; it lives until the
// process ends. After kMostDepths, which workers that join and leave under new names may reach, one
// depth serves all other names. Takes a lock: call once and keep the result.
constexpr std::size_t kMostDepths = 1000;
Depth& depth(Queue queue, const std::string& of);
// All depths.
std::vector<const Depth*> depths();

// Counts one waiting item, from its construction to its destruction.
class Waiting {
 public:
  Waiting() = default;  // counts nothing
  explicit Waiting(Depth& depth) noexcept : depth_(&depth) { depth.add(1); }
  ~Waiting() {
    if (depth_ != nullptr) depth_->add(-1);
  }
  Waiting(Waiting&& other) noexcept : depth_(std::exchange(other.depth_, nullptr)) {}
  Waiting& operator=(Waiting&& other) noexcept {
    std::swap(depth_, other.depth_);
    return *this;
  }

 private:
  Depth* depth_ = nullptr;
};

}  // namespace weft::trace
