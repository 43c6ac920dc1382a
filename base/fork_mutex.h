// A mutex of the whole process that fork() never leaves locked in the child. fork() waits for all
// of them, takes them in their order, and releases them in both processes: what one guards is whole
// in the child, whatever other threads did.
//
// For variables of static storage (they need no constructor to run), which a child uses as well. An
// object's own mutex needs this only where a child uses the object; groups and agents it does not
// use. A thread that holds one does not fork.
#pragma once

#include <atomic>
#include <mutex>

namespace weft {

// A thread that holds one may lock those that stand behind it.
enum class ForkOrder {
  Engine,     // what makes groups and agents
  Transport,  // what connects them
  Timeline,
  Dump,  // the files
  Jobs,
  Names,
  Counts,   // depths of queues, progress, what lives for ever
  Capture,  // of log messages
  Log,
  Config,
};

class ForkMutex {
 public:
  constexpr explicit ForkMutex(ForkOrder order) : order_(order) {}
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  // For as long as the process.
  ~ForkMutex() = default;

  void lock() {
    if (!enrolled_.load(std::memory_order_acquire)) enroll();
    if (!is_off()) mutex_.lock();
  }
  void unlock() {
    if (!is_off()) mutex_.unlock();
  }

  // Before anything else in a copy of a process that has crashed: threads that are not there may
  // hold any of them, and there is nobody to exclude.
  static void switch_all_off() noexcept;

 private:
  static bool is_off() noexcept;
  static void unlock_in_child();
  static const int registered_;  // 0: the three above are called by fork()
  void enroll();
  static void lock_all();
  static void unlock_all();

  std::mutex mutex_;
  const ForkOrder order_;
  std::atomic<bool> enrolled_{false};  // once it has been locked: fork() then knows of it
};

}  // namespace weft
