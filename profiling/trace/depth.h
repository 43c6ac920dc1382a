// How much waits where in this process, for the metrics to read: kept up to date by whoever has a
// queue.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace weft::trace {

enum class Queue : std::uint8_t {
  Calls,     // made here and unanswered; of: the worker that is called
  Handlers,  // functions that others called, and continuations, for which no thread is free yet;
             // of: the agent
  Messages,  // that a connection has taken and could not send yet; of: the transport
};

struct Depth {
  Queue queue;
  std::string of;
  std::atomic<std::int64_t> now{0};
  void add(std::int64_t change) noexcept { now.fetch_add(change, std::memory_order_relaxed); }
};

// The one of that queue and name, made if there is none; kept until the process ends. Behind the
// first kMostDepths, which workers that come and go under new names reach, it is that of all
// others. Takes a lock: ask once.
constexpr std::size_t kMostDepths = 1000;
Depth& depth(Queue queue, const std::string& of);
// All there are.
std::vector<const Depth*> depths();

// One thing that waits: counts from when it is made until it is gone.
class Waiting {
 public:
  Waiting() = default;  // counts nowhere
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
