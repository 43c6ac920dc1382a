// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/call/gate.h>

namespace weft::call {

void Gate::pass(Task task) {
  {
    MutexLock lock(mutex_);
    if (!open_) return waiting_.push_back(std::move(task));
  }
  task();
}

void Gate::open() {
  for (;;) {  // a task that comes meanwhile runs behind the earlier ones
    std::vector<Task> ready;
    {
      MutexLock lock(mutex_);
      ready.swap(waiting_);
      if (ready.empty()) {
        open_ = true;
        return;
      }
    }
    for (Task& task : ready) task();
  }
}

}  // namespace weft::call
