// SPDX-License-Identifier: Apache-2.0
// Threads that block in Gloo's wait for sends and recvs: Gloo completes messages on its own thread
// and notifies only a blocked waiter. Messages of one stream (a direction, a peer and a tag)
// complete in order, so one thread waits for all of them. There is one thread for each stream with
// pending messages, at most kMostThreads.
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
  // Joins the threads. Every task must be about to end (abort the communicator first). If called on
  // one of its own threads, detaches that one instead.
  ~Waiters();
  Waiters(const Waiters&) = delete;
  Waiters& operator=(const Waiters&) = delete;

  // Reserves a thread for the stream, calls `begin` on the calling thread, and runs the task that
  // it returns on the stream's thread, after the stream's earlier tasks. Thread-safe, but calls for
  // one stream must come one at a time. Throws the errors of `begin`. Throws Busy without calling
  // `begin` if no thread is available, because Gloo cannot withdraw a message.
  void run(const Stream& stream, const std::function<Task()>& begin);
  // Runs a task of no stream, which does not wait for messages, on a thread of its own, even if
  // kMostThreads are in use.
  void run(Task task);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace weft::transport::gloo
