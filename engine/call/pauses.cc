// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/call/core.h>
#include <weft/engine/call/pauses.h>

namespace weft::call {

std::uint64_t Pauses::after(std::chrono::milliseconds pause, Task task) {
  MutexLock lock(mutex_);
  if (core_.closed()) return 0;
  const std::uint64_t number = next_++;
  pauses_[number] = {
      std::move(task),
      core_.loop()->at(Deadline::in(pause), Task([weak = core_.weak_from_this(), number] {
                         if (const auto core = weak.lock()) core->pauses().over(number);
                       }))};
  return number;
}

void Pauses::over(std::uint64_t number) {
  Pause ended;
  {
    MutexLock lock(mutex_);
    ended = std::move(pauses_[number]);
    pauses_.erase(number);
  }
  if (ended.task) ended.task();
}

void Pauses::drop(std::uint64_t number) {
  Pause dropped;
  MutexLock lock(mutex_);
  const auto found = pauses_.find(number);
  if (found == pauses_.end()) return;
  dropped = std::move(found->second);
  pauses_.erase(found);
}

std::size_t Pauses::size() const {
  MutexLock lock(mutex_);
  return pauses_.size();
}

Pauses::All Pauses::take_all() {
  MutexLock lock(mutex_);
  return std::exchange(pauses_, {});
}

}  // namespace weft::call
