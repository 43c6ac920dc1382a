// SPDX-License-Identifier: Apache-2.0
// Starts host operations in the order in which they were issued, each once its `ready` fence has
// passed. An operation that is ready starts at once on the caller's thread. Otherwise it starts on
// the loop when its fence passes, and everything behind it waits in line, so that all ranks start
// the same operations in the same order. When the loop ends, operations that wait in line are
// dropped.
#pragma once

#include <deque>
#include <memory>

#include <weft/base/event_loop.h>
#include <weft/base/fence.h>
#include <weft/base/mutex.h>
#include <weft/base/task.h>

namespace weft::transport {

class FencedQueue : public std::enable_shared_from_this<FencedQueue> {
 public:
  explicit FencedQueue(const std::shared_ptr<EventLoop>& loop) : loop_(loop) {}

  // Thread-safe; `start` must not block and must not throw.
  void run(Fence ready, Task start);

 private:
  void drain();

  struct Waiting {
    Fence ready;
    Task start;
  };
  std::weak_ptr<EventLoop>
      loop_;  // the loop keeps this queue alive while an operation waits in line
  Mutex mutex_;
  std::deque<Waiting> waiting_ WEFT_GUARDED_BY(mutex_);
  bool draining_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::transport
