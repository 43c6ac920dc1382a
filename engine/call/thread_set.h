// SPDX-License-Identifier: Apache-2.0
// The threads of a thread pool, each joined after its end: by the thread that ends next, or by the
// one that waits for the end of all. So none runs beside the end of the process, and at most one
// ended thread is kept.
//
// Owned by the thread pool, whose mutex is held in every function. Only wait() blocks.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>

#include <weft/base/task.h>

namespace weft::call {

class ThreadSet {
 public:
  ThreadSet() = default;
  ThreadSet(const ThreadSet&) = delete;
  ThreadSet& operator=(const ThreadSet&) = delete;
  // No thread of the set works any more. One of them may be the thread that destroys the set.
  ~ThreadSet();

  // Starts a thread that runs `work`, which calls leave() at its end. Throws std::system_error.
  void start(Task work);
  int size() const { return static_cast<int>(threads_.size()); }
  // Takes the calling thread, which ends now, out of the set. Returns the one that ended before it:
  // the caller joins that without the mutex, if it is joinable.
  [[nodiscard]] std::thread leave();
  // Waits until no more than `threads` are left. Unlocks the mutex meanwhile.
  void wait(std::unique_lock<std::mutex>& lock, int threads);
  // Returns the thread that ended last, which the caller joins without the mutex.
  [[nodiscard]] std::thread take_last();

 private:
  std::condition_variable ended_;
  std::unordered_map<std::thread::id, std::thread> threads_;
  // The thread that ended last; it has joined the one before.
  std::thread last_;
};

}  // namespace weft::call
