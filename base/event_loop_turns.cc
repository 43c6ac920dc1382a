// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <ctime>
#include <optional>
#include <utility>

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/event_loop_inner.h>
#include <weft/base/mutex.h>
#include <weft/base/timer_slack.h>

namespace weft {

namespace {

using Clock = Deadline::Clock;
using std::chrono::nanoseconds;

// How long a loop with pollers, or with a waiting caller, spins after progress.
constexpr auto kSpin = std::chrono::microseconds(100);
// After this part of kSpin a caller yields the processor to other threads.
constexpr auto kShareAfter = std::chrono::microseconds(15);
// A sched_yield that takes this long means that another thread took the processor.
constexpr auto kTaken = std::chrono::microseconds(2);
// For this long after that, a caller yields as soon as it is idle.
constexpr auto kCrowded = std::chrono::milliseconds(10);
// The pause between calls of a poller without park(): a quarter of the idle time, within these
// limits.
constexpr auto kShortestPollPause = std::chrono::microseconds(20);
constexpr auto kLongestPollPause = std::chrono::microseconds(100);
// Shorter sleeps must end on time, without timer slack.
constexpr auto kShortSleep = std::chrono::milliseconds(1);
// How long the loop's thread leaves the turns to callers.
constexpr auto kGiveWay = std::chrono::microseconds(500);
// The longest rest of the loop's thread while callers stay.
constexpr auto kLongestRest = std::chrono::milliseconds(8);
// How long a client is assumed to compute on the processor where it was seen.
constexpr auto kComputes = std::chrono::milliseconds(10);
// While the loop spins on pollers, it looks at the descriptors once in this many turns.
constexpr int kTurnsPerLook = 64;
// It looks earlier if the turns take longer: a connection that rests tells its news by a
// descriptor.
constexpr auto kLookAfter = std::chrono::microseconds(50);
// The clock is read once in this many turns: a turn that finds nothing costs as much as reading it.
constexpr int kTurnsPerClock = 16;

// With one processor only, spinning keeps the awaited thread from running.
const bool kMaySpin = std::thread::hardware_concurrency() > 1;

}  // namespace

bool EventLoop::Inner::drive(const std::function<bool()>& done, Deadline deadline,
                             const void* awaited) {
  if (inside()) {
    throw Error(Blame::Caller,
                "a handler on loop '" + name + "' waits for something that only this loop can do");
  }
  Wait wait{awaited, {}};
  if (awaited != nullptr) wait.since = coarse_now();
  UniqueLock lock(turns_mutex);
  ++callers;
  while (!done() && !stopping) {
    if (!turning) {
      turns_for = wait;
      turning = true;
      lock.unlock();
      take_turns(done, deadline);
      lock.lock();
      turning = false;
      turns_for = {};
      if (now >= deadline.point()) break;
    } else if (!wait_for_turn(lock, done, deadline, wait)) {
      break;
    }
  }
  const bool was_last = --callers == 0;
  mailbox->note_client();
  if (was_last && !turning) {
    callers_left = now;
    hand_over();
  }
  if (!turning) pass_turn_on();
  lock.unlock();
  return done();
}

// Returns false if the deadline passed first.
bool EventLoop::Inner::wait_for_turn(std::unique_lock<std::mutex>& lock,
                                     const std::function<bool()>& done, Deadline deadline,
                                     const Wait& wait) {
  Waiter self{done, wait};
  self.place = waiters.insert(waiters.end(), &self);
  self.named = awaiting.emplace(wait.awaited, &self);
  const auto is_called = [&self] { return self.is_called; };
  if (deadline.is_never()) {
    self.changed.wait(lock, is_called);
  } else if (!self.changed.wait_until(lock, deadline.point(), is_called)) {
    waiters.erase(self.place);
    awaiting.erase(self.named);
    return false;
  }
  return true;
}

void EventLoop::Inner::call(Waiter& waiter) {
  waiters.erase(waiter.place);
  awaiting.erase(waiter.named);
  waiter.is_called = true;
  waiter.changed.notify_one();
}

void EventLoop::Inner::call_all_of(const void* awaited) {
  for (auto [next, end] = awaiting.equal_range(awaited); next != end;) call(*(next++)->second);
}

// Wakes the threads without `awaited` whose done() is true.
void EventLoop::Inner::call_done() {
  for (auto [next, end] = awaiting.equal_range(nullptr); next != end;) {
    Waiter& waiter = *(next++)->second;
    if (waiter.done()) call(waiter);
  }
}

// Called when no thread turns any more. Wakes the youngest waiter: where calls are nested, its
// result arrives first. That thread turns, or leaves drive() and passes the turn on itself.
void EventLoop::Inner::pass_turn_on() {
  call_done();
  if (!waiters.empty()) call(*waiters.back());
}

void EventLoop::Inner::take_turns(const std::function<bool()>& done, Deadline deadline) {
  turner.store(std::this_thread::get_id(), std::memory_order_relaxed);
  mailbox->attended.store(true, std::memory_order_relaxed);
  now = last_progress = Clock::now();
  for (;;) {
    const bool progressed = turn();
    if (done() || now >= deadline.point() || stopping) break;
    if (callers > 1 && progressed) {
      MutexLock guard(turns_mutex);
      call_done();
    }
    sleep(time_to_wait(deadline, progressed, Turner::Waits));
  }
  // Relaxed is enough: the mutex is locked before any thread relies on it.
  mailbox->attended.store(false, std::memory_order_relaxed);
  turner.store(std::thread::id(), std::memory_order_relaxed);
}

// Called when the last caller leaves. Wakes the loop's thread if it rests, or sleeps longer than
// the work that has arrived meanwhile allows.
void EventLoop::Inner::hand_over() {
  if (!standing_by) {
    MutexLock lock(mailbox->mutex);
    if (mailbox->is_urgent || mailbox->rests_long) mailbox->rested.notify_one();
    return;
  }
  const auto wait = time_to_wait(Deadline::never(), /*progressed=*/false, Turner::Leaves);
  if (wait.count() == 0 || (wait != nanoseconds::max() && Clock::now() + wait < standing_by_until))
    mailbox->wake();
}

void EventLoop::Inner::recall() {
  bool must_wake = false;
  {
    MutexLock lock(turns_mutex);
    must_wake = standing_by;
    call_all_of(nullptr);
  }
  {
    MutexLock lock(mailbox->mutex);
    mailbox->recalled = true;
    ++mailbox->recalls;
    must_wake |= mailbox->take_sleeping();
    if (mailbox->resting) mailbox->rested.notify_one();
  }
  if (must_wake) mailbox->wake();
}

void EventLoop::Inner::recall(const void* awaited) {
  {
    MutexLock lock(turns_mutex);
    call_all_of(awaited);
    // The turning thread checks after each turn.
    if (turns_for.awaited != awaited || inside()) return;
  }
  bool must_wake = false;
  {
    MutexLock lock(mailbox->mutex);
    mailbox->recalled = true;
    must_wake = mailbox->take_sleeping();
  }
  if (must_wake) mailbox->wake();
}

void EventLoop::Inner::serve(const std::function<bool()>& until) {
  for (nanoseconds most = kGiveWay;;) {
    const unsigned recalls = mailbox->recalls;
    UniqueLock lock(turns_mutex);
    if (stopping || until()) return;
    const bool may_wait = Clock::now() - callers_left < kGiveWay && !mailbox->has_posted;
    if (turning || callers > 0 || may_wait) {
      lock.unlock();
      most = rest(most, recalls);
      continue;
    }
    turning = true;
    turner.store(std::this_thread::get_id(), std::memory_order_relaxed);
    lock.unlock();
    own_turns(until);
  }
}

// Rests while callers turn, and shortly after: the next caller probably follows soon, and taking
// the turns from each other would cost both threads a wake-up. Posted work ends the rest if no
// caller runs it. Returns how long the next rest may be: while callers stay, the loop's thread
// looks less and less often, and the last caller wakes it when it leaves.
nanoseconds EventLoop::Inner::rest(nanoseconds most, unsigned recalls) {
  UniqueLock lock(mailbox->mutex);
  if (mailbox->closed || mailbox->recalls != recalls || (mailbox->is_urgent && callers == 0))
    return kGiveWay;
  mailbox->resting = true;
  mailbox->rests_long = most > kGiveWay;
  const bool is_called = mailbox->rested.wait_for(lock, most) == std::cv_status::no_timeout;
  mailbox->resting = mailbox->rests_long = false;
  return is_called || callers == 0 ? kGiveWay : std::min<nanoseconds>(2 * most, kLongestRest);
}

// Turns until there is nothing to do, then sleeps outside the turn, so that a caller can take over
// without a wake-up.
void EventLoop::Inner::own_turns(const std::function<bool()>& until) {
  nanoseconds wait(0);
  bool gives_way = false;
  now = Clock::now();
  while (wait.count() == 0 && !gives_way) {
    const bool progressed = turn();
    progressed_since_clock |= progressed;
    gives_way = stopping || callers > 0 || until();
    if (!gives_way) wait = time_to_wait(Deadline::never(), progressed, Turner::Serves);
  }
  turner.store(std::thread::id(), std::memory_order_relaxed);
  served_on = sched_getcpu();
  {
    MutexLock lock(turns_mutex);
    turning = false;
    standing_by = !gives_way && callers == 0 && !stopping;
    standing_by_until = wait == nanoseconds::max() ? Clock::time_point::max() : Clock::now() + wait;
    gives_way = !standing_by;
    pass_turn_on();
  }
  if (gives_way) return;
  sleep(wait);
  MutexLock lock(turns_mutex);
  standing_by = false;
}

void EventLoop::Inner::sweep() {
  if (!mailbox->garbage.load(std::memory_order_relaxed) || !mailbox->garbage.exchange(false))
    return;
  // Destroyed outside the lock, because handlers own objects.
  std::vector<std::shared_ptr<Entry>> dead;
  const auto take = [&dead](const std::shared_ptr<Entry>& entry) {
    if (entry->live) return false;
    dead.push_back(entry);
    return true;
  };
  MutexLock lock(mailbox->mutex);
  std::erase_if(timers, [&](const auto& item) { return take(item.second); });
  std::erase_if(descriptors, [&](const auto& item) { return take(item.second); });
  next_timer = timers.empty() ? Clock::time_point::max() : timers.begin()->first;
  auto left = std::make_shared<Pollers>(*pollers);
  if (std::erase_if(*left, take) == 0) return;
  pollers = std::move(left);
  pollers_changed = true;
}

bool EventLoop::Inner::turn() {
  if (++turns_since_clock >= kTurnsPerClock) {
    turns_since_clock = 0;
    look_at_clock();
  }
  sweep();
  bool progressed = run_posted();
  progressed |= run_timers();
  progressed |= run_pollers();
  if (polled->empty() || ++turns_since_look >= kTurnsPerLook || is_busy_for_long(progressed))
    progressed |= run_descriptors();
  return progressed;
}

// True if turns that had something to do have kept the loop from its descriptors for kLookAfter.
// With one poller only, the loop is busy with all that there is.
bool EventLoop::Inner::is_busy_for_long(bool progressed) {
  if (!progressed || polled->size() < 2) return false;
  const auto present = Clock::now();
  if (present - last_look < kLookAfter) return false;
  last_look = present;
  return true;
}

void EventLoop::Inner::look_at_clock() {
  now = Clock::now();
  if (std::exchange(progressed_since_clock, false)) last_progress = now;
}

bool EventLoop::Inner::run_posted() {
  if (!mailbox->has_posted.load(std::memory_order_relaxed)) return false;
  mailbox->has_posted.exchange(false, std::memory_order_acquire);
  std::vector<Task> tasks;
  {
    MutexLock lock(mailbox->mutex);
    tasks.swap(mailbox->posted);
    mailbox->is_urgent = false;
  }
  for (Task& task : tasks) {
    task();
    // The next task may report that this one has run, so its captures are destroyed first.
    task = Task();
  }
  return !tasks.empty();
}

bool EventLoop::Inner::run_timers() {
  if (next_timer.load() > now) return false;
  std::vector<std::shared_ptr<Entry>> due;
  {
    MutexLock lock(mailbox->mutex);
    while (!timers.empty() && timers.begin()->first <= now) {
      due.push_back(std::move(timers.begin()->second));
      timers.erase(timers.begin());
    }
    next_timer = timers.empty() ? Clock::time_point::max() : timers.begin()->first;
  }
  for (const auto& entry : due) {
    if (entry->live.exchange(false)) entry->task();
  }
  return !due.empty();
}

bool EventLoop::Inner::run_pollers() {
  if (pollers_changed.load(std::memory_order_acquire) && pollers_changed.exchange(false)) {
    // Destroyed outside the lock, because handlers own objects.
    std::shared_ptr<const Pollers> before;
    MutexLock lock(mailbox->mutex);
    before = std::exchange(polled, pollers);
  }
  bool progressed = false;
  for (const auto& entry : *polled) {
    if (entry->live) progressed |= entry->poller();
  }
  return progressed;
}

// True if the serving thread spins, or would spin, on the processor of the client. Spinning would
// interrupt the client, which then waits until the serving thread sleeps again.
bool EventLoop::Inner::would_hold_up_a_client(Turner who) {
  if (mailbox->client_cpu.load(std::memory_order_relaxed) >= 0) {
    client_cpu = mailbox->client_cpu.exchange(-1, std::memory_order_acquire);
    client = mailbox->client.load(std::memory_order_relaxed);
    client_until = now + kComputes;
  }
  if (now >= client_until) return false;
  if (who == Turner::Leaves) return client_cpu == served_on;
  return client_cpu == sched_getcpu() && client != std::this_thread::get_id();
}

// Returns how long the turning thread may sleep: zero while there is something to do or to spin
// for. A value above zero is valid until a wake-up: from now on, posted work, earlier timers and
// parked pollers cause one.
nanoseconds EventLoop::Inner::time_to_wait(Deadline limit, bool progressed, Turner who) {
  progressed_since_clock |= progressed;
  if (progressed) return nanoseconds(0);
  const bool spins =
      kMaySpin && (who == Turner::Waits || (!polled->empty() && !would_hold_up_a_client(who)));
  const auto spins_on = [&] {
    const auto idle = now - last_progress;
    if (!spins || idle >= kSpin) return false;
    // With more threads than processors, one of them may be the thread that a caller waits for, so
    // a caller yields. The serving thread does not yield: the threads that would run belong to its
    // own agent and wait for what this thread delivers.
    if (who == Turner::Waits && (idle >= kShareAfter || now < crowded_until)) give_way();
    return true;
  };
  if (spins_on()) return nanoseconds(0);
  look_at_clock();
  if (spins_on()) return nanoseconds(0);
  std::shared_ptr<const Pollers> all;
  auto until = limit.point();
  {
    MutexLock lock(mailbox->mutex);
    mailbox->sleeping = false;
    if (!mailbox->posted.empty() || mailbox->garbage || std::exchange(mailbox->recalled, false))
      return nanoseconds(0);
    all = pollers;
    if (!timers.empty()) until = std::min(until, timers.begin()->first);
    mailbox->sleeping = true;
  }
  for (const auto& entry : *all) {
    if (!entry->live) continue;
    if (!entry->park) {
      until = std::min(until, now + std::clamp<nanoseconds>((now - last_progress) / 4,
                                                            kShortestPollPause, kLongestPollPause));
    } else if (!entry->park()) {
      MutexLock lock(mailbox->mutex);
      mailbox->sleeping = false;
      return nanoseconds(0);
    }
  }
  // The first turn after a sleep looks at the descriptors and the clock.
  turns_since_look = kTurnsPerLook;
  turns_since_clock = kTurnsPerClock;
  if (until == Clock::time_point::max()) return nanoseconds::max();
  return std::max(nanoseconds(0), nanoseconds(until - now));
}

// Yields to any thread that is ready. If one takes the processor, others will follow, as with more
// ranks than processors.
void EventLoop::Inner::give_way() {
  const auto before = Clock::now();
  sched_yield();
  look_at_clock();
  if (now - before >= kTaken) crowded_until = now + kCrowded;
}

// epoll_wait's timeout is in milliseconds; ppoll on the epoll descriptor has nanoseconds.
void EventLoop::Inner::sleep(nanoseconds wait) const {
  if (wait.count() == 0) return;
  pollfd self{mailbox->epoll.get(), POLLIN, 0};
  const timespec limit{static_cast<time_t>(wait.count() / 1'000'000'000),
                       static_cast<long>(wait.count() % 1'000'000'000)};
  std::optional<NoTimerSlack> exact;
  if (wait < kShortSleep) exact.emplace();
  ppoll(&self, 1, wait == nanoseconds::max() ? nullptr : &limit, nullptr);
}

bool EventLoop::Inner::run_descriptors() {
  turns_since_look = 0;
  epoll_event events[64];
  const int count = epoll_wait(mailbox->epoll.get(), events, 64, 0);
  bool progressed = false;
  for (int i = 0; i < count; ++i) {
    // epoll_event is packed: a reference into it may be misaligned.
    const std::uint64_t key = events[i].data.u64;
    if (key == kWakeupKey) {
      // The wake-up is for the sleeping thread, so its counter stays set.
      if (standing_by) continue;
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(mailbox->wakeup.get(), &ignored, sizeof ignored);
      continue;
    }
    std::shared_ptr<Entry> entry;
    {
      MutexLock lock(mailbox->mutex);
      const auto found = descriptors.find(key);
      if (found == descriptors.end() || !found->second->live) continue;
      entry = found->second;
    }
    entry->handler(events[i].events);
    progressed = true;
  }
  return progressed;
}

}  // namespace weft
