// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <unistd.h>

#include <weft/python/backend/completions.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

namespace {

using Clock = std::chrono::steady_clock;

// Tasks that are nested deeper than this share one queue, where each holds the next up for a
// second.
constexpr std::size_t kDepths = 4;

// The depth of the task that this thread runs, from 1; 0 on other threads.
thread_local std::size_t depth = 0;

// The operation that this thread's task follows.
thread_local std::optional<Cause> task_cause;

// Holds the tasks of one depth, and runs them on threads of its own. One thread that runs no task
// always stands by.
class Queue {
 public:
  void run(std::function<void()> task, std::size_t its_depth) {
    const std::lock_guard lock(mutex_);
    depth_ = its_depth;
    tasks_.push_back(std::move(task));
    if (idle_ == 0) start();
    changed_.notify_all();
  }
  void await_end(Clock::time_point limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, limit, [&] { return tasks_.empty() && running_ == 0; });
  }

 private:
  static constexpr std::chrono::seconds kPatience{1};

  void start() {
    ++idle_;
    std::thread([this] { serve(); }).detach();
  }

  // Waits until a task may begin.
  void await_turn(std::unique_lock<std::mutex>& lock) {
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      if (running_ == 0 || Clock::now() - began_ >= kPatience) return;
      changed_.wait_until(lock, began_ + kPatience);
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    depth = depth_;
    for (;;) {
      await_turn(lock);
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      began_ = Clock::now();
      ++running_;
      if (--idle_ == 0) start();
      lock.unlock();
      if (interpreter_ends()) stay();  // callbacks need it
      task();
      task = nullptr;
      lock.lock();
      --running_;
      changed_.notify_all();
      if (idle_ > 1) return;
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t depth_ = 0;
  std::size_t idle_ = 0;     // threads that run no task
  std::size_t running_ = 0;  // tasks
  Clock::time_point began_;  // when the latest task began
};

struct Queues {
  const ::pid_t made_in = ::getpid();
  std::array<Queue, kDepths> by_depth;
};

}  // namespace

std::size_t depth_of_future() { return std::min(depth + 1, kDepths); }

namespace {

// Returns the queues of this process, whose parent's threads a fork has left behind. They outlive
// the interpreter.
Queues& own_queues() {
  static std::mutex mutex;
  static Queues* queues = nullptr;
  const std::lock_guard lock(mutex);
  if (queues == nullptr || queues->made_in != ::getpid()) queues = new Queues;
  return *queues;
}

}  // namespace

std::optional<Cause> cause_of_callback() { return task_cause; }

void complete_soon(std::size_t its_depth, const Cause& cause, std::function<void()> task) {
  const auto follow = [cause, task = std::move(task)] {
    task_cause = cause;
    task();
    task_cause.reset();
  };
  own_queues().by_depth[its_depth - 1].run(follow, its_depth);
}

void await_completions(std::chrono::milliseconds limit) {
  const auto end = Clock::now() + limit;
  for (Queue& queue : own_queues().by_depth) queue.await_end(end);
}

}  // namespace weft::python
