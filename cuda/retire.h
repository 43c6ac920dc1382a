// What cannot be given up at once: the driver's calls that free pinned memory or unload code wait
// for the whole device, and a destructor must not. Its owner hands the freeing over with the fence
// of the last use; it runs later, from a place that may block.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/fence.h>
#include <weft/base/task.h>

namespace weft::cuda {

// One per Device. Usable from every thread.
class Retirement {
 public:
  // Keeps the task until the fence has passed and somebody reclaims. Never blocks: for destructors.
  // The task should not own its device, and the fence of an event does: such a device lives until
  // somebody reclaims. One that fails is logged and dropped; it may retire itself again.
  void retire(Fence last_use, Task free) noexcept;

  // Runs the tasks whose fences have passed; returns how many. May block until everything on the
  // device has finished, so call it where no stream waits for this thread: between steps, at
  // shutdown, before a memory budget is exceeded.
  std::size_t reclaim();
  // The same for all of them, and what they retire, waiting for their fences; false if the deadline
  // came first, or what is left has failed.
  [[nodiscard]] bool reclaim_all(Deadline deadline);

  // How many tasks wait here.
  std::size_t pending() const;

 private:
  struct Item {
    Fence last_use;
    Task free;
  };
  mutable std::mutex mutex_;
  std::vector<Item> items_;
};

}  // namespace weft::cuda
