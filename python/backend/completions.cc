// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <unistd.h>

#include <weft/python/backend/completions.h>

namespace weft::python {

namespace {

class Threads {
 public:
  void run(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ == 0) start();
    has_task_.notify_one();
  }
  bool is_of_this_process() const { return made_in_ == ::getpid(); }

 private:
  // Futures whose callbacks block each other beyond this number wait for a thread.
  static constexpr std::size_t kMost = 256;

  void start() {
    if (threads_ == kMost) return;
    ++threads_;
    ++idle_;
    std::thread([this] { serve(); }).detach();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_task_.wait(lock, [&] { return !tasks_.empty(); });
      --idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      // The task may block until a later task has run.
      if (idle_ == 0) start();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      if (idle_ > 1) break;
      ++idle_;
    }
    --threads_;
  }

  const ::pid_t made_in_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<std::function<void()>> tasks_;
  std::size_t threads_ = 0;
  std::size_t idle_ = 0;  // threads that run no task
};

}  // namespace

void complete_soon(std::function<void()> task) {
  static std::mutex mutex;
  static Threads* threads = nullptr;  // outlives the interpreter; a fork leaves the parent's behind
  Threads* own = nullptr;
  {
    const std::lock_guard lock(mutex);
    if (threads == nullptr || !threads->is_of_this_process()) threads = new Threads;
    own = threads;
  }
  own->run(std::move(task));
}

}  // namespace weft::python
