// SPDX-License-Identifier: Apache-2.0
// The threads of an agent. One of them turns the loop. When a turn brings calls, the same thread
// runs them, outside the turn: to hand them to another thread would cost a wake-up, 20 to 40 µs on
// a virtual machine. Meanwhile a lookout wakes every 200 µs for as long as there is work. It takes
// the loop over if nobody has turned it for so long, and takes calls that wait and may run. So the
// loop is turned however many calls wait: results are sent while other calls run.
//
// A thread that blocks on a future does not count: other threads take its place if there is work
// for them. So calls that wait for calls do not starve, however deep, until kMostBlocked threads
// block. Then calls are refused, so that the blocked ones can end. Calls are also refused if no
// thread is free and none can be made.
//
// Owned by the agent's core and by the promises that continue on it. Usable from every thread;
// drive(), block() and stop() block. Its parts: the tasks and the counts by which they may run
// (task_queue.h), and the threads (thread_set.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/inheritance.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/task_queue.h>
#include <weft/engine/call/thread_set.h>
#include <weft/engine/future/executor.h>

namespace weft::call {

class ThreadPool final : public weft::detail::Executor,
                         public std::enable_shared_from_this<ThreadPool> {
 public:
  // Runs up to `threads` tasks at a time. The loop must have been made with
  // EventLoop::Thread::Given. Throws Busy if not even the first thread can be started.
  static std::shared_ptr<ThreadPool> make(std::string name, int threads,
                                          std::shared_ptr<EventLoop> loop);

  const char* name() const override { return "rpc"; }
  bool drive(const std::function<bool()>& done, Deadline deadline,
             const void* awaited = nullptr) override;
  void block(const std::function<void()>& wait) override;
  void recall(const void* awaited) noexcept override { loop_->recall(awaited); }
  bool inside() const override { return loop_->inside(); }
  // After stop() the task is dropped.
  void run(Task task) override;
  // Runs a call, which may be refused: then `refuse` runs instead, in a turn of the loop, with Busy
  // and advice.
  using Refuse = TaskQueue::Refuse;
  void run_call(Task task, Refuse refuse);
  // Whether the task that this thread runs found no thread free when it was added, and waited
  // behind others. It is no such wait if a free thread was slow to wake.
  static bool has_waited();
  // Like run(), for Weft's own tasks that wait for something outside, and never for each other.
  // They run beside the tasks that the limit counts, kMostBeside at a time.
  void run_beside(Task task);

  // Ends the threads and waits until they are gone, including the destructors of their
  // thread-locals, so that none runs beside the end of the process. A thread of its own that calls
  // this waits only for the others. The tasks that wait are dropped.
  void stop();
  // Number of tasks that run or wait.
  std::size_t active() const;
  // Number of tasks that wait.
  std::size_t waiting() const;
  // Whether a task that is added now has to wait for one that runs.
  bool is_full() const;
  // Calls are refused while so many threads block. kMostBlocked, except in tests.
  void limit_blocked(int threads);

 private:
  class Blocked;
  ThreadPool(std::string name, int threads, std::shared_ptr<EventLoop> loop);
  void add(TaskQueue::Waiting waiting);
  void work();
  void run_one(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);
  void serve(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);
  bool rest(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);
  void look_out(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);
  void call_another(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);
  void refuse_calls(std::unique_lock<std::mutex>& lock, const std::string& why)
      WEFT_REQUIRES(mutex_);
  void refuse_if_too_many_block(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);

  const MadeIn made_in_;
  const std::string name_;
  const std::shared_ptr<EventLoop> loop_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  TaskQueue queue_ WEFT_GUARDED_BY(mutex_);
  bool serving_ WEFT_GUARDED_BY(mutex_) = false;      // a thread serves the loop
  bool looking_ WEFT_GUARDED_BY(mutex_) = false;      // there is a lookout
  int idle_ WEFT_GUARDED_BY(mutex_) = 0;              // threads that sleep until they are called
  std::uint64_t served_ WEFT_GUARDED_BY(mutex_) = 0;  // how often the loop has been served
  // The loop was not served between two looks; it comes before tasks.
  bool overdue_ WEFT_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point last_work_ WEFT_GUARDED_BY(mutex_);
  bool is_short_of_threads_ WEFT_GUARDED_BY(mutex_) = false;  // and has logged it
  ThreadSet threads_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
