// SPDX-License-Identifier: Apache-2.0
// A mutex for the whole process that fork() never leaves locked in the child. fork() locks all of
// them in order and unlocks them in both processes, so the data that a mutex guards is consistent
// in the child, even if other threads were changing it.
//
// For static variables that a child also uses (it needs no constructor at run time). An object's
// own mutex needs this only if a child uses the object; a child does not use groups and agents. A
// thread must not fork while it holds one.
#pragma once

#include <atomic>
#include <mutex>

#include <weft/base/mutex.h>

namespace weft {

// A thread that holds one may lock only those listed after it.
enum class ForkOrder {
  Engine,     // creation of groups and agents
  Transport,  // their connections
  Timeline,
  Dump,  // the flight recorder's files
  Jobs,
  Names,
  Counts,   // depths of queues, progress, memory kept for good
  Capture,  // of log messages
  Log,
  Config,
};

class WEFT_LOCKABLE ForkMutex {
 public:
  constexpr explicit ForkMutex(ForkOrder order) : order_(order) {}
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  // A ForkMutex lives as long as the process.
  ~ForkMutex() = default;

  void lock() WEFT_ACQUIRES() WEFT_UNCHECKED_LOCKING {
    if (!enrolled_.load(std::memory_order_acquire)) enroll();
    if (!is_off()) mutex_.lock();
  }
  void unlock() WEFT_RELEASES() WEFT_UNCHECKED_LOCKING {
    if (!is_off()) mutex_.unlock();
  }

  // Turns locking off. Called first in the copy of a crashed process: threads that the copy does
  // not have may hold any of these mutexes, and no other thread is there to exclude.
  static void switch_all_off() noexcept;

 private:
  static bool is_off() noexcept;
  static void unlock_in_child();
  static const int kRegistered;  // 0 if fork() calls lock_all, unlock_all and unlock_in_child
  void enroll();
  static void lock_all();
  static void unlock_all();

  std::mutex mutex_;
  const ForkOrder order_;
  std::atomic<bool> enrolled_{false};  // locked at least once, so fork() knows it
};

}  // namespace weft
