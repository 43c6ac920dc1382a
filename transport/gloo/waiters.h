// Threads that block in Gloo's wait, one per outstanding send or recv: Gloo completes them on its own thread and tells
// nobody but a blocked waiter. Threads are kept for reuse.
#pragma once

#include <functional>
#include <memory>

#include <weft/base/task.h>

namespace weft::transport::gloo {

class Waiters {
 public:
  Waiters();
  // Joins the threads: every task must be on its way out (abort the communicator first). From inside one of its own
  // threads, that one is detached instead.
  ~Waiters();
  Waiters(const Waiters&) = delete;
  Waiters& operator=(const Waiters&) = delete;

  // Has a thread of its own for what may block, calls `begin` here, and runs the task that it returns there. Thread-safe.
  // Throws what `begin` throws, and Busy, without calling it, where no thread can be had: Gloo can take nothing back.
  void run(const std::function<Task()>& begin);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace weft::transport::gloo
