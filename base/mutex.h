// SPDX-License-Identifier: Apache-2.0
// Mutexes and locks whose use Clang checks at compile time (-Wthread-safety): members say by which
// mutex they are guarded, functions say which mutex their callers hold. With other compilers the
// annotations expand to nothing, and Mutex is a std::mutex.
//
//   class Counter {
//     void add() { MutexLock lock(mutex_); ++count_; }
//     int next() WEFT_REQUIRES(mutex_) { return count_ + 1; }
//     Mutex mutex_;
//     int count_ WEFT_GUARDED_BY(mutex_) = 0;
//   };
#pragma once

#include <mutex>

#if defined(__clang__)
#define WEFT_THREAD_SAFETY(...) __attribute__((__VA_ARGS__))
#else
#define WEFT_THREAD_SAFETY(...)
#endif

// On a class that can be locked, and on one that locks for as long as it lives.
#define WEFT_LOCKABLE WEFT_THREAD_SAFETY(capability("mutex"))
#define WEFT_SCOPED_LOCK WEFT_THREAD_SAFETY(scoped_lockable)
// On a member: a thread that reads or writes it holds the mutex. The second form guards the
// object that a pointer points to.
#define WEFT_GUARDED_BY(mutex) WEFT_THREAD_SAFETY(guarded_by(mutex))
#define WEFT_POINTEE_GUARDED_BY(mutex) WEFT_THREAD_SAFETY(pt_guarded_by(mutex))
// On a function or a lambda: its callers hold the mutexes; they do not hold them; it locks or
// unlocks them.
#define WEFT_REQUIRES(...) WEFT_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define WEFT_EXCLUDES(...) WEFT_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define WEFT_ACQUIRES(...) WEFT_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define WEFT_RELEASES(...) WEFT_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define WEFT_TRY_ACQUIRES(...) WEFT_THREAD_SAFETY(try_acquire_capability(__VA_ARGS__))
// On a function that the analysis cannot follow; a comment beside it says why it is right.
#define WEFT_UNCHECKED_LOCKING WEFT_THREAD_SAFETY(no_thread_safety_analysis)

namespace weft {

class WEFT_LOCKABLE Mutex : public std::mutex {
 public:
  void lock() WEFT_ACQUIRES() { std::mutex::lock(); }
  void unlock() WEFT_RELEASES() { std::mutex::unlock(); }
  bool try_lock() WEFT_TRY_ACQUIRES(true) { return std::mutex::try_lock(); }
};

// Holds a mutex (Mutex or ForkMutex) as long as it lives.
template <class M>
class WEFT_SCOPED_LOCK MutexLock {
 public:
  explicit MutexLock(M& mutex) WEFT_ACQUIRES(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() WEFT_RELEASES() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  M& mutex_;
};

// Holds a Mutex, and can unlock and lock it meanwhile. Condition variables wait with it, as with a
// std::unique_lock; a predicate that reads guarded members says WEFT_REQUIRES.
class WEFT_SCOPED_LOCK UniqueLock : public std::unique_lock<std::mutex> {
 public:
  explicit UniqueLock(Mutex& mutex) WEFT_ACQUIRES(mutex) : std::unique_lock<std::mutex>(mutex) {}
  ~UniqueLock() WEFT_RELEASES() = default;
  UniqueLock(const UniqueLock&) = delete;
  UniqueLock& operator=(const UniqueLock&) = delete;

  void lock() WEFT_ACQUIRES() { std::unique_lock<std::mutex>::lock(); }
  void unlock() WEFT_RELEASES() { std::unique_lock<std::mutex>::unlock(); }
};

}  // namespace weft
