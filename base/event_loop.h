// SPDX-License-Identifier: Apache-2.0
// Runs callbacks for descriptors, timers, posted work and fences. The callbacks of one loop run one
// at a time, so state that only they touch needs no lock.
//
// Callers drive progress: a thread that blocks on a result turns the loop itself (drive) instead of
// sleeping until the loop's thread wakes it, because that wake-up costs 20 to 40 µs on a virtual
// machine. A turn is one pass over everything that is ready. "On the loop" therefore means "inside
// a turn", on whichever thread. Any thread may call any function.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/fence.h>
#include <weft/base/task.h>

namespace weft {

class EventLoop {
  struct Entry;    // a timer, a watched descriptor or a poller
  struct Mailbox;  // posted work
  // Everything else. The loop's thread shares it, so a handler may destroy the loop inside a turn.
  struct Inner;

 public:
  // A timer, a watched descriptor or a poller. Destroying the registration ends it and never
  // blocks. A handler that another thread is running at that moment finishes; so a handler must own
  // the objects that it touches, and it may own the registration's owner. The loop destroys the
  // handler, with these objects, in its next turn, which follows at once. A registration may
  // outlive its loop.
  class [[nodiscard]] Registration {
   public:
    Registration() = default;
    Registration(Registration&&) noexcept = default;
    Registration& operator=(Registration&& other) noexcept;
    ~Registration() { reset(); }
    void reset() noexcept;
    // True while the loop has the registration.
    explicit operator bool() const { return !entry_.expired(); }

   private:
    friend class EventLoop;
    explicit Registration(const std::shared_ptr<Entry>& entry) : entry_(entry) {}
    std::weak_ptr<Entry> entry_;  // the loop's tables own the entry
  };

  // Which thread turns the loop while no caller drives it.
  enum class Thread {
    Own,    // a thread that the loop starts
    Given,  // threads that call serve(); nothing runs without one
  };

  // Debuggers and profilers show the first 15 characters of the name. Throws Busy if the process
  // can have no more descriptors or threads.
  explicit EventLoop(const std::string& name, Thread thread = Thread::Own);
  // Stops the thread and waits for the current turn to end, unless called from inside that turn.
  // Drops work that has not run.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs the task in a later turn. Tasks that one thread posts run in the order of the posts.
  void post(Task task);
  // Like post(), for work that pollers would find too. If a caller has driven the loop within the
  // last 500 µs, the loop's thread leaves the task to the next caller until those 500 µs are over.
  void post_soon(Task task);
  // Runs the task once, at the deadline or shortly after it.
  Registration at(Deadline deadline, Task task);
  // Calls the handler with the epoll events of the descriptor, level-triggered: `events` (EPOLLIN,
  // …), and always errors and hang-ups. The caller keeps the descriptor and closes it only after
  // the registration has ended.
  Registration watch(int descriptor, std::uint32_t events,
                     std::function<void(std::uint32_t)> handler);
  // Calls `poller` in every turn until the registration ends; `poller` returns true if it found
  // something to do.
  //
  // A loop with pollers spins for 100 µs after the last time that there was something to do. The
  // loop's thread does not spin on a processor on which a thread that called the loop recently may
  // be computing. Before the loop sleeps it calls each `park`, which arranges that a watched
  // descriptor becomes readable when there is something to do; it returns false if there is
  // already. A poller without `park` is called every 20 to 100 µs instead.
  Registration poll(std::function<bool()> poller, std::function<bool()> park = {});
  // Runs the task on the loop once the fence has passed.
  void when(const Fence& fence, Task task);

  // True if this thread is inside a turn of this loop.
  bool inside() const;
  // Turns the loop on this thread until done() is true or the deadline passes; returns done().
  // Something that happens on this loop must make done() true. done() may be called on several
  // threads. Throws Caller inside a turn.
  //
  // While another thread turns the loop, this one sleeps. It is woken when the turns pass to it,
  // and when done() is true: the turning thread calls done() after each turn. Where many threads
  // may wait, pass an address as `awaited`: then no other thread calls done() for this one, and the
  // code that makes done() true calls recall(awaited).
  bool drive(const std::function<bool()>& done, Deadline deadline = Deadline::never(),
             const void* awaited = nullptr);
  // One thread's wait in drive().
  struct Wait {
    const void* awaited = nullptr;
    std::chrono::steady_clock::time_point since;
  };
  // Returns the waits that began no later than `then`, without those that have no `awaited`.
  std::vector<Wait> waiting_since(std::chrono::steady_clock::time_point then) const;
  // Turns the loop on this thread as the loop's own thread does, and gives way to callers, until
  // until() is true or the loop is destroyed. Only one thread may serve at a time; until() is
  // called on that thread only.
  void serve(const std::function<bool()>& until);
  // Makes the threads in drive() without `awaited`, and the one in serve(), check their conditions
  // again, because another thread has changed something.
  void recall() noexcept;
  // For a forked child of the loop's process: closes the child's copies of the loop's own
  // descriptors and of those that the loop watches. Keep the loop, and the owners of those
  // descriptors, until the child ends. Takes no lock, because a thread that the child does not have
  // may hold it.
  void close_inherited() noexcept;
  // Makes the threads that wait in drive() for `awaited` check their conditions again. Any thread
  // may call it.
  void recall(const void* awaited) noexcept;

 private:
  std::shared_ptr<Inner> inner_;
  std::thread thread_;
};

}  // namespace weft
