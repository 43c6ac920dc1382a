// SPDX-License-Identifier: Apache-2.0
// The inside of EventLoop, for its two source files only: event_loop.cc has the functions that
// others call; event_loop_turns.cc decides which thread turns the loop, what a turn does, and how
// long the turning thread may sleep.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>

namespace weft {

struct EventLoop::Mailbox {
  void wake() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written =
        ::write(wakeup.get(), &one, sizeof one);  // a full counter has already woken the loop
  }

  void note_client() noexcept {
    client.store(std::this_thread::get_id(), std::memory_order_relaxed);
    client_cpu.store(sched_getcpu(), std::memory_order_release);
  }

  // Returns whether wake() must be called, and clears the flag, because one wake-up is enough.
  bool take_sleeping() WEFT_REQUIRES(mutex) { return std::exchange(sleeping, false); }

  void post(Task task, bool ends_rest = true) {
    bool must_wake = false;
    {
      MutexLock lock(mutex);
      if (closed) return;
      posted.push_back(std::move(task));
      has_posted.store(true, std::memory_order_release);
      must_wake = take_sleeping();
      is_urgent |= ends_rest;
      if (resting && is_urgent && !attended) rested.notify_one();
    }
    if (must_wake) wake();
  }

  // Notes that an entry has ended, and wakes the loop to destroy it, because its handler may own
  // this loop.
  void discard() {
    bool must_wake = false;
    {
      MutexLock lock(mutex);
      garbage = true;
      must_wake = take_sleeping();
    }
    if (must_wake) wake();
  }

  // Notes a descriptor that close_inherited() must close. Numbers beyond the table are ignored, so
  // those descriptors stay open in a forked child.
  void note_watched(int descriptor, bool is_watched) noexcept {
    const auto number = static_cast<std::size_t>(descriptor);
    if (number >= 64 * watched.size()) return;
    const std::uint64_t bit = std::uint64_t{1} << (number % 64);
    is_watched ? watched[number / 64].fetch_or(bit) : watched[number / 64].fetch_and(~bit);
  }

  std::array<std::atomic<std::uint64_t>, 512> watched{};  // one bit for each descriptor
  std::atomic<bool> inherited_closed{false};
  // In the mailbox, because registrations may outlive the loop.
  const Descriptor epoll{epoll_create1(EPOLL_CLOEXEC)};
  const Descriptor wakeup{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> garbage{false};     // an entry has ended and is still in a table
  std::atomic<bool> has_posted{false};  // lets a turn skip the mutex
  std::atomic<bool> attended{false};    // a caller turns the loop and will see posted work
  std::atomic<std::thread::id> client;  // the thread that posted or drove last
  std::atomic<int> client_cpu{-1};      // the processor it ran on; -1 once the loop has seen it
  Mutex mutex;
  // Signalled when the loop's thread, which has given way to callers, may be needed.
  std::condition_variable rested;
  bool resting WEFT_GUARDED_BY(mutex) = false;     // the loop's thread has given way
  bool rests_long WEFT_GUARDED_BY(mutex) = false;  // and must be told when the last caller leaves
  std::vector<Task> posted WEFT_GUARDED_BY(mutex);
  // A posted task ends the rest of the loop's thread.
  bool is_urgent WEFT_GUARDED_BY(mutex) = false;
  bool sleeping WEFT_GUARDED_BY(mutex) = false;  // a thread sleeps in epoll, or is about to
  // The turning thread must look again before it sleeps.
  bool recalled WEFT_GUARDED_BY(mutex) = false;
  // Counts calls of recall(): one made just before the loop's thread rests ends that rest too.
  std::atomic<unsigned> recalls{0};
  bool closed WEFT_GUARDED_BY(mutex) = false;
};

struct EventLoop::Entry {
  std::shared_ptr<Mailbox> mailbox;
  std::atomic<bool> live{true};
  Task task;                                   // timers
  std::function<void(std::uint32_t)> handler;  // descriptors
  std::function<bool()> poller;                // pollers
  std::function<bool()> park;                  // pollers; may be empty
  int descriptor = -1;
};

struct EventLoop::Inner {
  static constexpr std::uint64_t kWakeupKey = 0;  // the mailbox's key among the descriptors

  explicit Inner(std::string given_name);
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  void serve(const std::function<bool()>& until);
  void recall();
  void recall(const void* awaited);
  bool drive(const std::function<bool()>& done, Deadline deadline, const void* awaited);
  bool inside() const {
    return turner.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  void stop();
  void add_poller(std::shared_ptr<Entry> entry);

  using Pollers = std::vector<std::shared_ptr<Entry>>;

  const std::string name;
  const std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
  std::multimap<Deadline::Clock::time_point, std::shared_ptr<Entry>> timers
      WEFT_GUARDED_BY(mailbox->mutex);
  std::atomic<Deadline::Clock::time_point> next_timer{Deadline::Clock::time_point::max()};
  std::shared_ptr<const Pollers> pollers WEFT_GUARDED_BY(mailbox->mutex) =
      std::make_shared<const Pollers>();  // replaced as a whole
  std::atomic<bool> pollers_changed{false};
  std::unordered_map<std::uint64_t, std::shared_ptr<Entry>> descriptors
      WEFT_GUARDED_BY(mailbox->mutex);
  std::uint64_t next_key WEFT_GUARDED_BY(mailbox->mutex) = 1;

  void own_turns(const std::function<bool()>& until);
  std::chrono::nanoseconds rest(std::chrono::nanoseconds most, unsigned recalls);
  void take_turns(const std::function<bool()>& done, Deadline deadline);
  void hand_over() WEFT_REQUIRES(turns_mutex);
  struct Waiter;
  bool wait_for_turn(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                     Deadline deadline, const Wait& wait) WEFT_REQUIRES(turns_mutex);
  void call(Waiter& waiter) WEFT_REQUIRES(turns_mutex);
  void call_all_of(const void* awaited) WEFT_REQUIRES(turns_mutex);
  void call_done() WEFT_REQUIRES(turns_mutex);
  void pass_turn_on() WEFT_REQUIRES(turns_mutex);
  bool turn();
  void look_at_clock();
  bool is_busy_for_long(bool progressed);
  void sweep();
  bool run_posted();
  bool run_timers();
  bool run_pollers();
  bool run_descriptors();
  enum class Turner {
    Waits,   // a caller that goes on turning
    Leaves,  // a caller that leaves
    Serves   // the loop's thread
  };
  std::chrono::nanoseconds time_to_wait(Deadline limit, bool progressed, Turner who);
  bool would_hold_up_a_client(Turner who);
  void give_way();
  void sleep(std::chrono::nanoseconds wait) const;

  // A thread that sleeps inside drive() while another one turns. Each waiter has its own condition
  // variable, so waking one of many threads costs the others nothing.
  struct Waiter {
    const std::function<bool()>& done;
    const Wait wait;
    std::list<Waiter*>::iterator place = {};
    std::unordered_multimap<const void*, Waiter*>::iterator named = {};
    std::condition_variable changed = {};
    bool is_called = false;  // and removed from both tables
  };

  Mutex turns_mutex;
  // In the order in which they began to wait.
  std::list<Waiter*> waiters WEFT_GUARDED_BY(turns_mutex);
  // The same waiters, by the object that they await; null: a turn calls their done().
  std::unordered_multimap<const void*, Waiter*> awaiting WEFT_GUARDED_BY(turns_mutex);
  Wait turns_for WEFT_GUARDED_BY(turns_mutex);  // the wait of the caller that turns
  bool turning WEFT_GUARDED_BY(turns_mutex) = false;
  // Threads inside drive(). This and `stopping` change under turns_mutex.
  std::atomic<int> callers{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> standing_by{false};  // the loop's thread sleeps in epoll, outside a turn
  // The end of that sleep.
  Deadline::Clock::time_point standing_by_until WEFT_GUARDED_BY(turns_mutex);
  // When the last caller left.
  Deadline::Clock::time_point callers_left WEFT_GUARDED_BY(turns_mutex) =
      Deadline::Clock::time_point();
  std::atomic<std::thread::id> turner;

  // Used only by the thread that turns.
  std::shared_ptr<const Pollers> polled = pollers;
  Deadline::Clock::time_point now = Deadline::Clock::now();  // as of a few turns ago
  Deadline::Clock::time_point last_progress;
  // Progress since the clock was last read. `now` is too old for last_progress: one turn may take
  // longer than kSpin.
  bool progressed_since_clock = false;
  int served_on = -1;      // the processor on which the loop's thread turned last
  std::thread::id client;  // the last client that the loop has seen
  int client_cpu = -1;
  Deadline::Clock::time_point client_until;
  Deadline::Clock::time_point crowded_until;  // other threads want the processor until then
  int turns_since_look = 0;
  Deadline::Clock::time_point last_look{};  // that is_busy_for_long() demanded
  int turns_since_clock = 0;
};

}  // namespace weft
