// Threads that block in Gloo's wait for sends and recvs: Gloo completes them on its own thread and
// tells nobody but a blocked waiter. Messages of one stream (a direction, a peer and a tag) are
// done in order, so that one thread waits for all of them; there are as many threads as streams
// with messages under way, kMostThreads at most.
#pragma once

#include <compare>
#include <cstddef>
#include <functional>
#include <memory>

#include <weft/base/task.h>

namespace weft::transport::gloo {

class Waiters {
 public:
  static constexpr std::size_t kMostThreads = 1024;

  struct Stream {
    bool receives = false;
    int peer = -1;  // -1: any
    int tag = 0;
    auto operator<=>(const Stream&) const = default;
  };

  Waiters();
  // Joins the threads: every task must be on its way out (abort the communicator first). From
  // inside one of its own threads, that one is detached instead.
  ~Waiters();
  Waiters(const Waiters&) = delete;
  Waiters& operator=(const Waiters&) = delete;

  // Has a thread for what may block, calls `begin` here, and runs the task that it returns behind
  // the earlier ones of the stream. Thread-safe; calls for one stream come one at a time. Throws
  // what `begin` throws, and Busy, without calling it, where no thread can be had: Gloo can take
  // nothing back.
  void run(const Stream& stream, const std::function<Task()>& begin);
  // The same for a task that is of no stream and does not wait for messages; above kMostThreads as
  // well.
  void run(Task task);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace weft::transport::gloo
