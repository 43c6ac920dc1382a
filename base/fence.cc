#include <weft/base/error.h>
#include <weft/base/fence.h>
#include <weft/base/futex.h>

namespace weft {

void HostFlag::raise() noexcept {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    if (query()) return;
    word_->store(value_, std::memory_order_release);
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
  for (;;) {
    const std::uint32_t seen = word_->load(std::memory_order_acquire);
    if (reached(seen)) return true;
    if (deadline.passed()) return false;
    futex_wait(word_, seen, deadline);
  }
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
