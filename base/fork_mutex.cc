// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include <pthread.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/make_error.h>

namespace weft {

namespace {

std::atomic<bool> off{false};

// The mutexes that have been locked at least once, in no order. The table has no lock of its own,
// because a thread that locks a mutex for the first time may hold others that fork() waits for.
constexpr std::size_t kMost = 64;
constinit std::array<std::atomic<ForkMutex*>, kMost> table{};

constinit std::mutex forking;  // guards held and held_count
constinit std::array<ForkMutex*, kMost> held{};
constinit std::size_t held_count = 0;

}  // namespace

// Registered when the library is loaded, because a running fork() does not call handlers that are
// registered after it began. With the first lock it would be too late.
const int ForkMutex::kRegistered = ::pthread_atfork(lock_all, unlock_all, unlock_in_child);

void ForkMutex::enroll() {
  if (kRegistered != 0) broken("pthread_atfork is out of memory");
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
  // unlock_all() unlocks them.
  std::for_each(held.begin(), end, [](ForkMutex* one) WEFT_UNCHECKED_LOCKING { one->lock(); });
}

void ForkMutex::unlock_all() {
  std::for_each(held.begin(), held.begin() + held_count,
                [](ForkMutex* one) WEFT_UNCHECKED_LOCKING { one->unlock(); });
  forking.unlock();
}

void ForkMutex::unlock_in_child() {
  // A thread that does not exist here may hold a mutex that was first locked during the fork.
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
