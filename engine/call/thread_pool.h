// The threads of an agent. One of them turns the loop; when a turn brings calls, that very thread
// runs them, outside the turn: handing them to another would cost a wake-up, 20 to 40 µs on a
// virtual machine. Meanwhile a lookout, awake every 200 µs for as long as there is work, takes the
// loop over if nobody has turned it for so long, and takes calls that wait and may run. However
// many wait, the loop is turned: what has been computed leaves while the rest is.
//
// A thread that blocks on a future does not count: as many take its place as there is work for, so
// calls that wait for calls do not starve, however deep, until kMostBlocked threads block. Then
// calls are refused, and what the blocked ones wait for can end; as they are where no thread is
// free and none can be made.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/inheritance.h>
#include <weft/engine/future/executor.h>
#include <weft/profiling/trace/depth.h>

namespace weft::rpc {

constexpr int kMostBlocked = 4096;  // threads of one agent
constexpr int kMostBeside =
    64;  // of those, that run tasks beside the limit: there is one for each message, and few wait

class ThreadPool final : public weft::detail::Executor,
                         public std::enable_shared_from_this<ThreadPool> {
 public:
  // Up to `threads` threads run tasks at a time. The loop was made for given threads
  // (EventLoop::Thread::Given). Throws Busy where not even the first can be started.
  static std::shared_ptr<ThreadPool> make(std::string name, int threads,
                                          std::shared_ptr<EventLoop> loop);

  const char* name() const override { return "rpc"; }
  bool drive(const std::function<bool()>& done, Deadline deadline,
             const void* awaited = nullptr) override;
  void block(const std::function<void()>& wait) override;
  void recall(const void* awaited) noexcept override { loop_->recall(awaited); }
  void recall() noexcept { loop_->recall(); }  // those that drive without naming what they wait for
  bool inside() const override { return loop_->inside(); }
  // After stop() the task is dropped.
  void run(Task task) override;
  // A call, which may be refused: then `refuse` runs instead, in a turn of the loop, with Busy and
  // what to do.
  using Refuse = std::function<void(const Error& why)>;
  void run_call(Task task, Refuse refuse);
  // Whether the task that this thread runs found no thread free when it was given, and waited
  // behind others. A free thread may be slow to wake, and that is no such wait.
  static bool has_waited();
  // As run(), of Weft's own tasks that wait for what is outside, and for none of their kind: beside
  // those that the limit counts, kMostBeside at a time.
  void run_beside(Task task);

  ~ThreadPool() override;

  // Ends the threads and waits until they are gone, their thread-locals' destructors included, so
  // that none runs beside the end of the process; of its own thread that calls this, only until the
  // others have left. The tasks that wait are dropped.
  void stop();
  // Tasks that run or wait to.
  std::size_t active() const;
  // Tasks that wait to.
  std::size_t waiting() const;
  // Whether a task that comes now has to wait for one that runs.
  bool is_full() const;
  // While so many threads block, calls are refused: kMostBlocked, but for tests.
  void limit_blocked(int threads);

 private:
  class Blocked;
  ThreadPool(std::string name, int threads, std::shared_ptr<EventLoop> loop);
  struct Waiting {
    Task task;
    Refuse refuse;            // of a call
    bool has_waited = false;  // behind others
  };
  void add(std::deque<Waiting>& tasks, Waiting waiting);
  void work();
  void run_one(std::unique_lock<std::mutex>& lock);
  void serve(std::unique_lock<std::mutex>& lock);
  bool rest(std::unique_lock<std::mutex>& lock);
  void look_out(std::unique_lock<std::mutex>& lock);
  void call_another(std::unique_lock<std::mutex>& lock);
  void refuse_calls(std::unique_lock<std::mutex>& lock, const std::string& why);
  void refuse_if_too_many_block(std::unique_lock<std::mutex>& lock);
  // All with the mutex held.
  int threads() const { return static_cast<int>(threads_.size()); }
  bool may_grow() const {
    return threads() - blocked_ < limit_ + 2 && blocked_ < most_blocked_ + kReserve;
  }
  bool may_run_beside() const { return !beside_.empty() && busy_beside_ < kMostBeside; }
  // That a thread may take the newest task at once.
  bool has_room() const { return static_cast<int>(tasks_.size()) <= limit_ - (busy_ - blocked_); }
  bool may_run() const {
    return may_run_beside() || (!tasks_.empty() && busy_ - blocked_ < limit_);
  }
  void note() { wanted_ = stopping_ || may_run(); }  // after every change of what they ask

  // Threads that may block beyond the most, of continuations and Weft's own tasks: what ends the
  // blocked ones runs there.
  static constexpr int kReserve = 512;

  const MadeIn made_in_;
  const std::string name_;
  const int limit_;
  const std::shared_ptr<EventLoop> loop_;
  trace::Depth& waiting_;  // tasks

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable ended_;
  std::deque<Waiting> tasks_;
  std::deque<Waiting> beside_;
  std::atomic<bool> wanted_{
      false};  // a task may run, or the end has come: whoever serves the loop should leave it
  bool stopping_ = false;
  bool serving_ = false;  // a thread serves the loop
  bool looking_ = false;  // there is a lookout
  std::unordered_map<std::thread::id, std::thread> threads_;
  std::thread last_;  // that has left: it joins the one before
  int idle_ = 0;      // sleep until they are called
  int busy_ = 0;      // run tasks, blocked ones among them
  int blocked_ = 0;   // of those, that block on a future, or run a task beside the limit
  int busy_beside_ = 0;
  int most_blocked_ = kMostBlocked;
  std::uint64_t served_ = 0;  // how often the loop has been
  bool overdue_ = false;      // for the time between two looks it has not: that comes before tasks
  std::chrono::steady_clock::time_point last_work_;
  bool is_short_of_threads_ = false;  // and has said so
};

}  // namespace weft::rpc
