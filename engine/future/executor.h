// Where futures live that an agent completes: the loop that brings their results, which who blocks
// on one drives meanwhile, and threads that may block, for their continuations. And what follows a
// call through continuations, coroutines and the threads it starts: the ambient.
#pragma once

#include <functional>
#include <memory>

#include <weft/base/deadline.h>
#include <weft/base/export.h>
#include <weft/base/task.h>

namespace weft::detail {

// Usable from every thread.
class Home {
 public:
  Home() = default;
  Home(const Home&) = delete;
  Home& operator=(const Home&) = delete;
  virtual ~Home() = default;
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

class Ambient {
 public:
  Ambient() = default;
  Ambient(const Ambient&) = delete;
  Ambient& operator=(const Ambient&) = delete;
  virtual ~Ambient() = default;
  virtual const std::shared_ptr<Home>& home() const = 0;
};
using AmbientRef = std::shared_ptr<const Ambient>;

// This thread's; null outside of calls.
WEFT_API const AmbientRef& ambient();
// The ambient's home, or null.
WEFT_API std::shared_ptr<Home> ambient_home();

// Sets this thread's ambient while it lives.
class [[nodiscard]] WEFT_API AmbientScope {
 public:
  explicit AmbientScope(AmbientRef ambient);
  ~AmbientScope();
  AmbientScope(const AmbientScope&) = delete;
  AmbientScope& operator=(const AmbientScope&) = delete;

 private:
  AmbientRef before_;
};

// The task, run in the ambient of the thread that is here now.
WEFT_API Task in_this_ambient(Task task);

}  // namespace weft::detail
