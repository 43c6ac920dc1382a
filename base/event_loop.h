// One thread that owns state: epoll, timers, posted work, and fences to watch. All handlers of a
// loop run one at a time, so what only they touch needs no lock.
//
// Caller-driven progress: a thread that blocks on a result *drives the loop itself* (drive) instead
// of sleeping until the loop's thread wakes it; that wake-up costs 20 to 40 µs on a virtual
// machine. "On the loop" therefore means "inside a turn", whichever thread turns. Every function
// may be called from every thread.
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
  struct Entry;    // one timer, descriptor or poller
  struct Mailbox;  // posted work
  struct Inner;    // everything else; shared with the thread, so that the loop may be destroyed
                   // inside its own turn

 public:
  // A timer, a watched descriptor or a poller. Destroying it ends it: a handler that runs at that
  // moment on another thread finishes, so handlers own what they touch, and may own this
  // registration's owner; what they own goes in the loop's next turn, which comes at once. Never
  // blocks. May outlive the loop.
  class [[nodiscard]] Registration {
   public:
    Registration() = default;
    Registration(Registration&&) noexcept = default;
    Registration& operator=(Registration&& other) noexcept;
    ~Registration() { reset(); }
    void reset() noexcept;
    // Whether the loop still has it.
    explicit operator bool() const { return !entry_.expired(); }

   private:
    friend class EventLoop;
    explicit Registration(const std::shared_ptr<Entry>& entry) : entry_(entry) {}
    std::weak_ptr<Entry> entry_;  // the loop's tables own it
  };

  // Who turns the loop while no caller drives it.
  enum class Thread {
    Own,    // a thread of the loop's
    Given,  // threads that are given to it, by serve(); without one nothing happens
  };

  // The name shows in debuggers and profilers (15 characters of it). Throws Busy: no descriptors,
  // no thread.
  explicit EventLoop(const std::string& name, Thread thread = Thread::Own);
  // Stops the thread and waits for the turn that runs, unless it is called from inside it. Work
  // that has not run is dropped.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs the task in a later turn; tasks of one thread keep their order.
  void post(Task task);
  // The same for what pollers would find, if they looked: where a caller has driven the loop within
  // the last 500 µs, its own thread leaves that to the next one until they have passed.
  void post_soon(Task task);
  // Runs the task once, at the deadline or soon after.
  Registration at(Deadline deadline, Task task);
  // Calls the handler with the epoll events that came (EPOLLIN, …; errors and hang-ups are always
  // reported), level-triggered. The descriptor stays the caller's and must outlive the
  // registration.
  Registration watch(int descriptor, std::uint32_t events,
                     std::function<void(std::uint32_t)> handler);
  // Calls the function in every turn while it lives; it returns whether it found something to do. A
  // loop with pollers spins for 100 µs after there was something to do, but not on a processor
  // where a thread that has called it lately may compute. Then it asks `park` of each, which
  // arranges that a watched descriptor becomes readable when something comes, and returns whether
  // nothing has come until then; and sleeps. A poller without `park` is looked at every 20 to 100
  // µs instead.
  Registration poll(std::function<bool()> poller, std::function<bool()> park = {});
  // Runs the task on the loop once the fence has passed.
  void when(const Fence& fence, Task task);

  // Whether this thread is inside a turn of this loop.
  bool inside() const;
  // Turns the loop on this thread until done() is true or the deadline passes; returns done().
  // done() must become true by something that happens on this loop, and is asked from several
  // threads. Not from inside a turn.
  //
  // While another thread turns the loop, this one sleeps. It is woken for its turn, and when done()
  // is true: whoever turns asks that after each turn. Where many threads may wait, `awaited` names
  // what this one waits for, by an address: then nobody asks done() for it, and whoever makes it
  // true calls recall(awaited).
  bool drive(const std::function<bool()>& done, Deadline deadline = Deadline::never(),
             const void* awaited = nullptr);
  // A wait of one thread in drive().
  struct Wait {
    const void* awaited = nullptr;
    std::chrono::steady_clock::time_point since;
  };
  // Returns the waits that began no later than `then`, but for those of threads that gave drive()
  // no `awaited`.
  std::vector<Wait> waiting_since(std::chrono::steady_clock::time_point then) const;
  // Turns the loop on this thread as the loop's own thread does, giving way to callers, until
  // until() is true or the loop is destroyed. One thread at a time; until() is asked on this thread
  // only.
  void serve(const std::function<bool()>& until);
  // Whoever drives or serves asks its function again: what it waits for was brought about by
  // another thread. Except those that have told drive() what they wait for.
  void recall() noexcept;
  // In a forked child of the loop's process: closes its own copies of the descriptors that the loop
  // watches and of the loop's own. The loop, and what owns those descriptors, must be kept until
  // the process ends. Takes no lock, which a thread that is not there any more may have had.
  void close_inherited() noexcept;
  // The threads that wait in drive() for `awaited` ask their functions again, whichever thread made
  // them true.
  void recall(const void* awaited) noexcept;

 private:
  std::shared_ptr<Inner> inner_;
  std::thread thread_;
};

}  // namespace weft
