// SPDX-License-Identifier: Apache-2.0
// Runs the continuations of a job's operations (Work::future()) on threads that may block.
// Operations end on the backends' threads: a continuation that waited there for another operation
// would wait for itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/future/executor.h>

namespace weft::group {

// A thread that blocks on a future or a Work does not count: others replace it while there are
// tasks.
class Continuations final : public weft::detail::Executor,
                            public std::enable_shared_from_this<Continuations> {
 public:
  // Drives nothing, since backends make progress by themselves. Throws Caller if it would block a
  // backend's thread.
  const char* name() const override { return "futures"; }
  bool drive(const std::function<bool()>& done, Deadline deadline, const void* awaited) override;
  void block(const std::function<void()>& wait) override;
  void recall(const void* /*awaited*/) noexcept override {}
  bool inside() const override;
  // Runs the task at once on this thread after stop(), or if no thread can be started.
  void run(Task task) override;

  // Ends the threads when all tasks have run. Waits for them if `waits`, except for the calling
  // thread.
  void stop(bool waits);

 private:
  void work();
  // Starts or wakes a thread if a task waits and no thread is free.
  void call_another() WEFT_REQUIRES(mutex_);

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ WEFT_GUARDED_BY(mutex_);
  int idle_ WEFT_GUARDED_BY(mutex_) = 0;
  int blocked_ WEFT_GUARDED_BY(mutex_) = 0;
  bool stopping_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::group
