// SPDX-License-Identifier: Apache-2.0
// The tasks of a thread pool: those that wait, and how many threads run one. These counts decide
// whether a task may run now, whether another thread is worth its start, and whether calls must be
// refused.
//
// Owned by the thread pool, whose mutex is held in every function. Nothing here blocks or runs a
// task.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/task.h>
#include <weft/profiling/trace/depth.h>

namespace weft::call {

constexpr int kMostBlocked = 4096;  // threads of one agent
// At most so many threads run tasks beside the limit. There is one such task for each message, and
// few wait.
constexpr int kMostBeside = 64;

class TaskQueue {
 public:
  using Refuse = std::function<void(const Error& why)>;
  struct Waiting {
    Task task;
    Refuse refuse;            // set for a call
    bool is_beside = false;   // runs beside the tasks that the limit counts
    bool has_waited = false;  // behind others; set by add()
  };

  // Lets `limit` tasks run at a time. `depth` shows how many wait.
  TaskQueue(int limit, trace::Depth& depth) : limit_(limit), depth_(depth) {}

  void add(Waiting waiting);
  // Takes the next task that may run; then a thread runs it, until finish(). Requires may_run().
  Waiting take();
  void finish(bool is_beside);
  // A thread that runs a task begins or ends to wait for something. Meanwhile it does not count.
  void block();
  void unblock();
  // Takes the calls that wait.
  std::vector<Waiting> take_calls();
  // Takes all tasks, for the end; add() is not called afterwards.
  std::deque<Waiting> close();
  bool closed() const { return closed_; }

  bool may_run() const {
    return may_run_beside() || (!tasks_.empty() && busy_ - blocked_ < limit_);
  }
  // Whether tasks wait that the limit counts.
  bool has_tasks() const { return !tasks_.empty(); }
  // Whether so many threads block that the calls that wait must be refused.
  bool must_refuse() const { return blocked_ >= most_blocked_ && has_tasks(); }
  // Whether a thread more than `threads` may be started, and whether each of `threads` is needed.
  bool may_grow(int threads) const {
    return threads - blocked_ < limit_ + 2 && blocked_ < most_blocked_ + kReserve;
  }
  bool needs(int threads) const { return threads - blocked_ <= limit_ + 2; }
  // Whether a task that is added now has to wait for one that runs.
  bool is_full() const { return busy_ - blocked_ + static_cast<int>(tasks_.size()) > limit_; }
  std::size_t waiting() const { return tasks_.size() + beside_.size(); }
  int busy() const { return busy_; }
  int blocked() const { return blocked_; }
  int most_blocked() const { return most_blocked_; }
  void limit_blocked(int threads) { most_blocked_ = threads; }
  // A task may run, or the end has come: the thread that serves the loop should leave it. May be
  // read without the mutex.
  const std::atomic<bool>& wanted() const { return wanted_; }

 private:
  bool may_run_beside() const { return !beside_.empty() && busy_beside_ < kMostBeside; }
  // Whether a thread may take the newest task at once.
  bool has_room() const { return static_cast<int>(tasks_.size()) <= limit_ - (busy_ - blocked_); }
  // Call it after every change of the state that may_run() reads.
  void note() { wanted_ = closed_ || may_run(); }

  // Threads beyond most_blocked_ that may block, for continuations and Weft's own tasks, which end
  // the blocked calls.
  static constexpr int kReserve = 512;

  const int limit_;
  trace::Depth& depth_;
  std::deque<Waiting> tasks_;
  std::deque<Waiting> beside_;
  int busy_ = 0;     // threads that run tasks, blocked ones among them
  int blocked_ = 0;  // busy threads that block on a future, or run a task beside the limit
  int busy_beside_ = 0;
  int most_blocked_ = kMostBlocked;
  bool closed_ = false;
  std::atomic<bool> wanted_{false};
};

}  // namespace weft::call
