// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/base/fence.h>
#include <weft/base/futex.h>
#include <weft/base/mutex.h>

namespace weft {

void HostFlag::raise() noexcept {
  std::vector<Task> tasks;
  {
    MutexLock lock(mutex_);
    if (query()) return;
    word_->store(value_, std::memory_order_seq_cst);
    tasks.swap(tasks_);
  }
  // A thread that goes to sleep counts itself first and then reads the word, so either it sees the
  // new word or this thread sees its count. A shared word may have sleepers that other flags count.
  if (word_ != &own_word_ || sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(word_);
  raised();
  for (Task& task : tasks) task();
}

bool HostFlag::synchronize(Deadline deadline) const noexcept {
  // A wake-up across cores costs 20 to 40 µs on a virtual machine, so spin for a moment before
  // sleeping.
  constexpr int kSpins = 400;
  for (int i = 0; i < kSpins; ++i) {
    if (query()) return true;
    spin_pause();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  bool passed = false;
  for (;;) {
    const std::uint32_t seen = word_->load(std::memory_order_seq_cst);
    passed = reached(seen);
    if (passed || deadline.passed()) break;
    futex_wait(word_, seen, deadline);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return passed;
}

void HostFlag::wait(const cuda::StreamRef&) const {
  if (query()) return;
  throw Error(
      Blame::Unsupported,
      "a stream cannot wait on a flag in plain host memory; take the flag from cuda::FlagPool");
}

bool HostFlag::on_passed(Task& task) const {
  {
    MutexLock lock(mutex_);
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
