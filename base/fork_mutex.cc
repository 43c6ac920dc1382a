#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include <pthread.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>

namespace weft {

namespace {

std::atomic<bool> off{false};

// The mutexes that have been locked once, in no order. A table, and no lock of its own: who locks
// one for the first time may hold others, for which fork() waits.
constexpr std::size_t kMost = 64;
constinit std::array<std::atomic<ForkMutex*>, kMost> table{};

constinit std::mutex forking;  // of the next two
constinit std::array<ForkMutex*, kMost> held{};
constinit std::size_t held_count = 0;

}  // namespace

// When this library is loaded: a fork() that has begun runs no handlers that are registered after
// that, so with the first lock it would be too late.
const int ForkMutex::registered_ = ::pthread_atfork(lock_all, unlock_all, unlock_in_child);

void ForkMutex::enroll() {
  if (registered_ != 0) broken("pthread_atfork has no memory");
  for (std::atomic<ForkMutex*>& place : table) {
    ForkMutex* known = nullptr;
    if (!place.compare_exchange_strong(known, this) && known != this) continue;
    enrolled_.store(true, std::memory_order_release);
    return;
  }
  broken("more than 64 ForkMutex");
}

void ForkMutex::lock_all() {
  forking.lock();
  held_count = 0;
  for (const std::atomic<ForkMutex*>& place : table) {
    if (ForkMutex* const one = place.load()) held[held_count++] = one;
  }
  const auto end = held.begin() + held_count;
  std::sort(held.begin(), end, [](const ForkMutex* a, const ForkMutex* b) {
    return std::pair(a->order_, a) < std::pair(b->order_, b);
  });
  std::for_each(held.begin(), end, [](ForkMutex* one) { one->lock(); });
}

void ForkMutex::unlock_all() {
  std::for_each(held.begin(), held.begin() + held_count, [](ForkMutex* one) { one->unlock(); });
  forking.unlock();
}

void ForkMutex::unlock_in_child() {
  // One that was first locked while this process was made may be held by a thread that is not here.
  for (const std::atomic<ForkMutex*>& place : table) {
    ForkMutex* const one = place.load();
    const auto end = held.begin() + held_count;
    if (one != nullptr && std::find(held.begin(), end, one) == end) std::construct_at(&one->mutex_);
  }
  unlock_all();
}

void ForkMutex::switch_all_off() noexcept { off.store(true, std::memory_order_relaxed); }

bool ForkMutex::is_off() noexcept { return off.load(std::memory_order_relaxed); }

}  // namespace weft
