// SPDX-License-Identifier: Apache-2.0
// The executor of futures that an agent completes: the event loop that delivers their results,
// which a thread that blocks on such a future drives meanwhile, and threads that may block, which
// run continuations. Also the execution context, which follows a call through continuations,
// coroutines and the threads that the call starts.
#pragma once

#include <functional>
#include <memory>

#include <weft/base/deadline.h>
#include <weft/base/export.h>
#include <weft/base/task.h>

namespace weft::detail {

// Usable from every thread.
class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;
  // The name under which waits for its futures are counted (profiling/trace/host_time.h). Has
  // static lifetime.
  virtual const char* name() const = 0;
  // Drives the loop until done() or the deadline; returns done(). The code that makes done() true
  // then calls recall(awaited). Throws Caller inside a turn of the loop, since only something after
  // that turn could make done() true.
  virtual bool drive(const std::function<bool()>& done, Deadline deadline, const void* awaited) = 0;
  // Runs `wait`, which blocks on something other than the loop.
  virtual void block(const std::function<void()>& wait) = 0;
  // Wakes the threads that drive for `awaited`: their done() is now true.
  virtual void recall(const void* awaited) noexcept = 0;
  // True if this thread is inside a turn of the loop and must not block.
  virtual bool inside() const = 0;
  // Runs the task on a thread that may block.
  virtual void run(Task task) = 0;
};

class ExecutionContext {
 public:
  ExecutionContext() = default;
  ExecutionContext(const ExecutionContext&) = delete;
  ExecutionContext& operator=(const ExecutionContext&) = delete;
  virtual ~ExecutionContext() = default;
  virtual const std::shared_ptr<Executor>& executor() const = 0;
  // The one in which this one was set, where it leaves that one in force; else null.
  virtual const ExecutionContext* around() const { return nullptr; }
};
using ExecutionContextRef = std::shared_ptr<const ExecutionContext>;

// This thread's execution context; null outside of calls.
WEFT_API const ExecutionContextRef& execution_context();
// The executor of this thread's execution context, or null.
WEFT_API std::shared_ptr<Executor> current_executor();

// Sets this thread's execution context while it lives.
class [[nodiscard]] WEFT_API ExecutionContextScope {
 public:
  explicit ExecutionContextScope(ExecutionContextRef execution_context);
  ~ExecutionContextScope();
  ExecutionContextScope(const ExecutionContextScope&) = delete;
  ExecutionContextScope& operator=(const ExecutionContextScope&) = delete;

 private:
  ExecutionContextRef before_;
};

// Wraps the task so that it runs in the present execution context of this thread.
WEFT_API Task in_this_execution_context(Task task);

}  // namespace weft::detail
