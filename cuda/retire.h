// SPDX-License-Identifier: Apache-2.0
// Frees CUDA resources later. The driver's calls that free pinned memory or unload code wait for
// the whole device, and a destructor must not wait. The owner instead hands over a task that frees
// the resource, with the fence of its last use; the task runs later, in a place that may block.
#pragma once

#include <cstddef>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/fence.h>
#include <weft/base/mutex.h>
#include <weft/base/task.h>

namespace weft::cuda {

// One per Device. Any thread may use it.
class Retirement {
 public:
  // Keeps the task until the fence has passed and reclaim() or reclaim_all() is called. Never
  // blocks, so destructors may call it. The task should not own its device; the fence of an event
  // does own it, and then the device lives until the task has run. A task that throws is logged and
  // dropped; it may retire itself again.
  void retire(Fence last_use, Task free) noexcept;

  // Runs the tasks whose fences have passed; returns their number. May block until all work on the
  // device has finished, so call it where no stream waits for this thread: between steps, at
  // shutdown, before a memory budget is exceeded.
  std::size_t reclaim();
  // Runs all tasks, and those that they retire, and waits for their fences. Returns false if the
  // deadline passed first, or if the remaining tasks have failed.
  [[nodiscard]] bool reclaim_all(Deadline deadline);

  // Returns the number of tasks that have not run.
  std::size_t pending() const;

 private:
  struct Item {
    Fence last_use;
    Task free;
  };
  // Removes and returns the items whose fences have passed.
  std::vector<Item> take_passed();
  mutable Mutex mutex_;
  std::vector<Item> items_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::cuda
