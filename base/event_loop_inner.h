// How an EventLoop is made, for its two source files only: event_loop.cc (what others call) and
// event_loop_turns.cc (who turns the loop, what a turn does, and how long whoever turned may
// sleep).
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

namespace weft {

struct EventLoop::Mailbox {
  void wake() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written =
        ::write(wakeup.get(), &one, sizeof one);  // full means already woken
  }

  void note_client() noexcept {
    client.store(std::this_thread::get_id(), std::memory_order_relaxed);
    client_cpu.store(sched_getcpu(), std::memory_order_release);
  }

  // With the mutex held. Returns whether somebody must be woken; the flag is cleared because one
  // wake-up is enough.
  bool take_sleeping() { return std::exchange(sleeping, false); }

  void post(Task task, bool ends_rest = true) {
    bool must_wake = false;
    {
      std::lock_guard lock(mutex);
      if (closed) return;
      posted.push_back(std::move(task));
      has_posted.store(true, std::memory_order_release);
      must_wake = take_sleeping();
      is_urgent |= ends_rest;
      if (resting && is_urgent && !attended) rested.notify_one();
    }
    if (must_wake) wake();
  }

  // An entry has died. What its handler owns may own this loop, so it is not kept until somebody
  // else wakes it.
  void discard() {
    bool must_wake = false;
    {
      std::lock_guard lock(mutex);
      garbage = true;
      must_wake = take_sleeping();
    }
    if (must_wake) wake();
  }

  // Those beyond the highest number that has a bit stay open in a child.
  void note_watched(int descriptor, bool is_watched) noexcept {
    const auto number = static_cast<std::size_t>(descriptor);
    if (number >= 64 * watched.size()) return;
    const std::uint64_t bit = std::uint64_t{1} << (number % 64);
    is_watched ? watched[number / 64].fetch_or(bit) : watched[number / 64].fetch_and(~bit);
  }

  std::array<std::atomic<std::uint64_t>, 512> watched{};  // descriptors: a bit each
  std::atomic<bool> inherited_closed{false};
  const Descriptor epoll{
      epoll_create1(EPOLL_CLOEXEC)};  // here, as registrations may outlive the loop
  const Descriptor wakeup{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> garbage{false};     // an entry died and is still in a table
  std::atomic<bool> has_posted{false};  // what a turn asks before it takes the mutex
  std::atomic<bool> attended{false};    // a caller turns, and will see what is posted
  std::atomic<std::thread::id> client;  // that posted last, or drove
  std::atomic<int> client_cpu{-1};      // where that was; -1: seen
  std::mutex mutex;
  std::condition_variable rested;  // the loop's thread has given way to callers and may be needed
  bool resting = false;            // it has
  bool rests_long = false;         // and is to be told when the last of them goes
  std::vector<Task> posted;
  bool is_urgent = false;  // one of them, which ends the rest of the loop's thread
  bool sleeping = false;   // somebody is, or is about to be, inside epoll
  bool recalled = false;   // whoever turns should look again before it sleeps
  std::atomic<unsigned> recalls{
      0};  // how many: one that comes before the loop's thread rests ends that rest too
  bool closed = false;
};

struct EventLoop::Entry {
  std::shared_ptr<Mailbox> mailbox;
  std::atomic<bool> live{true};
  Task task;                                   // timers
  std::function<void(std::uint32_t)> handler;  // descriptors
  std::function<bool()> poller;                // pollers
  std::function<bool()> park;                  // pollers, where it can be
  int descriptor = -1;
};

struct EventLoop::Inner {
  static constexpr std::uint64_t kWakeupKey = 0;  // of the mailbox among the descriptors

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
  const std::shared_ptr<Mailbox> mailbox =
      std::make_shared<Mailbox>();  // its mutex guards the tables below as well
  std::multimap<Deadline::Clock::time_point, std::shared_ptr<Entry>> timers;
  std::atomic<Deadline::Clock::time_point> next_timer{Deadline::Clock::time_point::max()};
  std::shared_ptr<const Pollers> pollers =
      std::make_shared<const Pollers>();  // replaced as a whole
  std::atomic<bool> pollers_changed{false};
  std::unordered_map<std::uint64_t, std::shared_ptr<Entry>> descriptors;
  std::uint64_t next_key = 1;

  void own_turns(const std::function<bool()>& until);
  std::chrono::nanoseconds rest(std::chrono::nanoseconds most, unsigned recalls);
  void take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                  Deadline deadline);
  void hand_over();
  struct Waiter;
  bool wait_for_turn(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                     Deadline deadline, const Wait& wait);
  // All of these require turns_mutex.
  void call(Waiter& waiter);
  void call_all_of(const void* awaited);
  void call_done();
  void pass_turn_on();
  bool turn();
  void look_at_clock();
  void sweep();
  bool run_posted();
  bool run_timers();
  bool run_pollers();
  bool run_descriptors();
  enum class Turner {
    Waits,
    Leaves,
    Serves
  };  // a caller that goes on turning, one that goes, and the loop's thread
  std::chrono::nanoseconds time_to_wait(Deadline limit, bool progressed, Turner who);
  bool would_hold_up_a_client(Turner who);
  void give_way();
  void sleep(std::chrono::nanoseconds wait) const;

  // A thread inside drive() that sleeps while another one turns. Each has a condition of its own:
  // what wakes one of many threads must not cost the others anything.
  struct Waiter {
    const std::function<bool()>& done;
    const Wait wait;
    std::list<Waiter*>::iterator place = {};
    std::unordered_multimap<const void*, Waiter*>::iterator named = {};
    std::condition_variable changed = {};
    bool is_called = false;  // and is in neither table any more
  };

  std::mutex turns_mutex;      // of who may turn
  std::list<Waiter*> waiters;  // in the order in which they began to wait
  std::unordered_multimap<const void*, Waiter*>
      awaiting;    // the same by what they await; null: done() is asked
  Wait turns_for;  // of the caller that turns
  bool turning = false;
  std::atomic<int> callers{0};  // threads inside drive(); changed under the mutex, as is the next
  std::atomic<bool> stopping{false};
  std::atomic<bool> standing_by{false};  // the loop's thread sleeps in epoll outside a turn
  Deadline::Clock::time_point standing_by_until;  // then
  Deadline::Clock::time_point callers_left =
      Deadline::Clock::time_point();  // when the last caller went
  std::atomic<std::thread::id> turner;

  // Of whoever turns.
  std::shared_ptr<const Pollers> polled = pollers;
  Deadline::Clock::time_point now = Deadline::Clock::now();  // as of some turns ago
  Deadline::Clock::time_point last_progress;
  bool progressed_since_clock = false;  // a turn may take longer than anybody spins
  int served_on = -1;                   // the processor
  std::thread::id client;               // as last seen
  int client_cpu = -1;
  Deadline::Clock::time_point client_until;
  Deadline::Clock::time_point crowded_until;  // other threads want the processor
  int turns_since_look = 0;
  int turns_since_clock = 0;
};

}  // namespace weft
