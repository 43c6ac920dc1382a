// Where the continuations of a job's operations run (Work::future()): on threads that may block.
// The threads that end operations are the backends': one that waited there for another operation
// would wait for itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <weft/engine/future/executor.h>

namespace weft::group {

// A thread that blocks on a future or a Work does not count: as many take its place as there are
// tasks for.
class Continuations final : public weft::detail::Executor,
                            public std::enable_shared_from_this<Continuations> {
 public:
  // Nothing is driven: backends go on by themselves. Throws Caller where a backend's thread would
  // be blocked.
  const char* name() const override { return "futures"; }
  bool drive(const std::function<bool()>& done, Deadline deadline, const void* awaited) override;
  void block(const std::function<void()>& wait) override;
  void recall(const void* /*awaited*/) noexcept override {}
  bool inside() const override;
  // After stop(), and where no thread is to be had, at once on this thread.
  void run(Task task) override;

  // Ends the threads when all tasks have run. Waits for them, but on one of them, and with `waits`
  // false.
  void stop(bool waits);

 private:
  void work();
  // With the mutex held: one more thread where a task waits and no thread is free.
  void call_another();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  int idle_ = 0;
  int blocked_ = 0;
  bool stopping_ = false;
};

}  // namespace weft::group
