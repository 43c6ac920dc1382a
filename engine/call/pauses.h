// SPDX-License-Identifier: Apache-2.0
// Tasks that one agent runs after a pause, such as another attempt to send a message. Owned by
// AgentCore. Usable from every thread; the tasks run on the loop. Nothing here blocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/task.h>

namespace weft::call {

class AgentCore;

class Pauses {
 public:
  explicit Pauses(AgentCore& core) : core_(core) {}

  // Runs the task on the loop after the pause. It is dropped if the agent leaves before, or if
  // drop() is called with the number that this returns.
  std::uint64_t after(std::chrono::milliseconds pause, Task task);
  void drop(std::uint64_t number);
  std::size_t size() const;  // pauses that are not over

  struct Pause {
    Task task;  // it may refer to the agent; a timer's own task would live as long as the loop
    EventLoop::Registration timer;
  };
  using All = std::map<std::uint64_t, Pause>;
  // For an agent that has been closed: takes the pauses that are not over. None is added later.
  All take_all();

 private:
  void over(std::uint64_t number);

  AgentCore& core_;
  mutable Mutex mutex_;
  All pauses_ WEFT_GUARDED_BY(mutex_);
  std::uint64_t next_ WEFT_GUARDED_BY(mutex_) = 1;
};

}  // namespace weft::call
