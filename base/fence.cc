#include <weft/base/error.h>
#include <weft/base/fence.h>
#include <weft/base/futex.h>

namespace weft {

void HostFlag::raise() noexcept {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    if (word_->exchange(1, std::memory_order_release) != 0) return;
    tasks.swap(tasks_);
  }
  futex_wake_all(word_);
  for (Task& task : tasks) task();
}

bool HostFlag::synchronize(Deadline deadline) const noexcept {
  // A wake-up across cores costs 20 to 40 µs on a virtual machine, so look for a moment before sleeping.
  constexpr int kSpins = 400;
  for (int i = 0; i < kSpins; ++i) {
    if (query()) return true;
    spin_pause();
  }
  while (!query()) {
    if (deadline.passed()) return false;
    futex_wait(word_, 0, deadline);
  }
  return true;
}

void HostFlag::wait(const cuda::StreamRef&) const {
  throw Error(Blame::Unsupported, "a stream cannot wait on a flag in plain host memory; take the flag from cuda::FlagPool");
}

bool HostFlag::on_passed(Task& task) const {
  {
    std::lock_guard lock(mutex_);
    if (!query()) {
      tasks_.push_back(std::move(task));
      return true;
    }
  }
  Task now = std::move(task);
  now();
  return true;
}

}  // namespace weft
