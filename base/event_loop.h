// One thread that owns state: epoll, timers, posted work, and fences to watch. All handlers of a loop run one at a time, so
// what only they touch needs no lock.
//
// Caller-driven progress: a thread that blocks on a result *drives the loop itself* (drive) instead of sleeping until the
// loop's thread wakes it; that wake-up costs 20 to 40 µs on a virtual machine. "On the loop" therefore means "inside a
// turn", whichever thread turns. Every function may be called from every thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/fence.h>
#include <weft/base/task.h>

namespace weft {

class EventLoop {
  struct Entry;    // one timer, descriptor or poller
  struct Mailbox;  // posted work; outlives the loop for those who still hold it

 public:
  // A timer, a watched descriptor or a poller. Destroying it ends it: a handler that runs at that moment on another thread
  // finishes, so handlers own what they touch. Never blocks.
  class [[nodiscard]] Registration {
   public:
    Registration() = default;
    Registration(Registration&&) noexcept = default;
    Registration& operator=(Registration&& other) noexcept;
    ~Registration() { reset(); }
    void reset() noexcept;
    explicit operator bool() const { return entry_ != nullptr; }

   private:
    friend class EventLoop;
    explicit Registration(std::shared_ptr<Entry> entry) : entry_(std::move(entry)) {}
    std::shared_ptr<Entry> entry_;
  };

  // Starts the loop's thread. The name shows in debuggers and profilers (15 characters of it).
  explicit EventLoop(const std::string& name);
  // Stops the thread; work that has not run is dropped. Not from inside a turn of this loop.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs the task in a later turn; tasks of one thread keep their order.
  void post(Task task);
  // Runs the task once, at the deadline or soon after.
  Registration at(Deadline deadline, Task task);
  // Calls the handler with the epoll events that came (EPOLLIN, …; errors and hang-ups are always reported),
  // level-triggered. The descriptor stays the caller's and must outlive the registration.
  Registration watch(int descriptor, std::uint32_t events, std::function<void(std::uint32_t)> handler);
  // Calls the function in every turn while it lives; it returns whether it found something to do. A loop with pollers spins
  // for a moment and then looks every 50 µs.
  Registration poll(std::function<bool()> poller);
  // Runs the task on the loop once the fence has passed.
  void when(const Fence& fence, Task task);

  // Whether this thread is inside a turn of this loop.
  bool inside() const;
  // Turns the loop on this thread until done() is true or the deadline passes; returns done(). done() must become true by
  // something that happens on this loop, and is asked from several threads. Not from inside a turn.
  bool drive(const std::function<bool()>& done, Deadline deadline = Deadline::never());

 private:
  void run();
  void turn(Deadline limit);
  void sweep();
  bool run_posted();
  bool run_timers();
  bool run_pollers();
  bool run_descriptors(std::chrono::nanoseconds wait);
  std::chrono::nanoseconds time_to_wait(Deadline limit, bool progressed);
  void take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, Deadline deadline);

  std::string name_;
  int epoll_ = -1;
  std::shared_ptr<Mailbox> mailbox_;  // its mutex guards the tables below as well
  std::multimap<Deadline::Clock::time_point, std::shared_ptr<Entry>> timers_;
  std::vector<std::shared_ptr<Entry>> pollers_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Entry>> descriptors_;
  std::uint64_t next_key_ = 1;

  std::mutex turns_mutex_;  // of who may turn
  std::condition_variable turns_changed_;
  bool turning_ = false;
  int callers_ = 0;  // threads inside drive()
  bool stopping_ = false;
  std::atomic<std::thread::id> turner_;

  Deadline::Clock::time_point last_progress_;
  std::thread thread_;
};

}  // namespace weft
