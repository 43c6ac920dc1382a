// Where futures live that an agent completes: the loop that brings their results, which who blocks
// on one drives meanwhile, and threads that may block, for their continuations. And what follows a
// call through continuations, coroutines and the threads it starts: the execution context.
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
  // Under which waits for its futures are counted (profiling/trace/host_time.h). Has static
  // lifetime.
  virtual const char* name() const = 0;
  // Blocks until done() or the deadline, driving the loop; returns done(). Throws Caller inside a
  // turn of the loop: only what comes after that turn could make it true. `awaited`: whoever makes
  // done() true calls recall() with it.
  virtual bool drive(const std::function<bool()>& done, Deadline deadline, const void* awaited) = 0;
  // Runs a function that blocks on something else.
  virtual void block(const std::function<void()>& wait) = 0;
  // The done() of those that drive for `awaited` is true.
  virtual void recall(const void* awaited) noexcept = 0;
  // Whether this thread is inside a turn of the loop and must not block.
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

// This thread's; null outside of calls.
WEFT_API const ExecutionContextRef& execution_context();
// The execution context's executor, or null.
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

// The task, run in the execution context of the thread that is here now.
WEFT_API Task in_this_execution_context(Task task);

}  // namespace weft::detail
