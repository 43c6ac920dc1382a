// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/autograd/pass_ending.h>

namespace weft::autograd {

void PassEnding::watch(EventLoop& loop, Deadline deadline, Task expire) {
  MutexLock lock(mutex_);
  timer_ = loop.at(deadline, std::move(expire));
}

bool PassEnding::end() {
  if (ended_.exchange(true)) return false;
  EventLoop::Registration timer;  // destroyed after the lock
  MutexLock lock(mutex_);
  timer = std::move(timer_);
  return true;
}

bool PassEnding::fail() {
  if (!end()) return false;
  *failed_ = true;
  return true;
}

void PassEnding::tell(Future<void> told) {
  MutexLock lock(mutex_);
  told_ = std::move(told);
}

Future<void> PassEnding::told() const {
  MutexLock lock(mutex_);
  return told_;
}

}  // namespace weft::autograd
