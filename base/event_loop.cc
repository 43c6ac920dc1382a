#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>

namespace weft {

namespace {

using Clock = Deadline::Clock;
using std::chrono::nanoseconds;

constexpr auto kSpin = std::chrono::microseconds(100);       // after progress, with pollers or with a caller that waits
constexpr auto kShareAfter = std::chrono::microseconds(15);  // of that: from then on a caller leaves others the processor
constexpr auto kPollPause = std::chrono::microseconds(50);   // between looks, with pollers that cannot be parked
constexpr auto kGiveWay = std::chrono::microseconds(500);    // how long the loop's thread leaves the turns to callers
constexpr auto kComputes = std::chrono::milliseconds(10);    // a client, where it was seen
constexpr int kTurnsPerLook = 64;                            // at the descriptors, while pollers are spun on
constexpr int kTurnsPerClock = 16;  // a turn that finds nothing takes as long as asking for the time
constexpr std::uint64_t kWakeupKey = 0;

// Spinning keeps whoever is waited for from running where there is one processor only.
const bool kMaySpin = std::thread::hardware_concurrency() > 1;

}  // namespace

struct EventLoop::Mailbox {
  Mailbox() : wakeup(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Mailbox() { ::close(wakeup); }

  void wake() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wakeup, &one, sizeof one);  // full means already woken
  }

  void note_client() noexcept {
    client.store(std::this_thread::get_id(), std::memory_order_relaxed);
    client_cpu.store(sched_getcpu(), std::memory_order_release);
  }

  // With the mutex held. Returns whether somebody must be woken; the flag is cleared because one wake-up is enough.
  bool take_sleeping() { return std::exchange(sleeping, false); }

  void post(Task task) {
    bool must_wake = false;
    {
      std::lock_guard lock(mutex);
      if (closed) return;
      posted.push_back(std::move(task));
      has_posted.store(true, std::memory_order_release);
      must_wake = take_sleeping();
      if (resting && !attended) rested.notify_one();
    }
    if (must_wake) wake();
  }

  // An entry has died. What its handler owns may own this loop, so it is not kept until somebody else wakes it.
  void discard() {
    bool must_wake = false;
    {
      std::lock_guard lock(mutex);
      garbage = true;
      must_wake = take_sleeping();
    }
    if (must_wake) wake();
  }

  const int wakeup;
  std::atomic<bool> garbage{false};     // an entry died and is still in a table
  std::atomic<bool> has_posted{false};  // what a turn asks before it takes the mutex
  std::atomic<bool> attended{false};    // a caller turns, and will see what is posted
  std::atomic<std::thread::id> client;  // that posted last, or drove
  std::atomic<int> client_cpu{-1};      // where that was; -1: seen
  std::mutex mutex;
  std::condition_variable rested;  // the loop's thread has given way to callers and may be needed
  bool resting = false;            // it has
  std::vector<Task> posted;
  bool sleeping = false;  // somebody is, or is about to be, inside epoll
  bool recalled = false;  // whoever turns should look again before it sleeps
  bool closed = false;
};

struct EventLoop::Entry {
  std::shared_ptr<Mailbox> mailbox;
  std::atomic<bool> live{true};
  Task task;                                   // timers
  std::function<void(std::uint32_t)> handler;  // descriptors
  std::function<bool()> poller;                // pollers
  std::function<bool()> park;                  // pollers, where it can be
  int epoll = -1;
  int descriptor = -1;
};

struct EventLoop::Inner {
  explicit Inner(std::string given_name);
  ~Inner() { ::close(epoll); }
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  void serve(const std::function<bool()>& until);
  void recall();
  bool drive(const std::function<bool()>& done, Deadline deadline);
  bool inside() const { return turner.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  void stop();
  void add_poller(std::shared_ptr<Entry> entry);

  using Pollers = std::vector<std::shared_ptr<Entry>>;

  const std::string name;
  const int epoll;
  const std::shared_ptr<Mailbox> mailbox;  // its mutex guards the tables below as well
  std::multimap<Clock::time_point, std::shared_ptr<Entry>> timers;
  std::atomic<Clock::time_point> next_timer{Clock::time_point::max()};
  std::shared_ptr<const Pollers> pollers = std::make_shared<const Pollers>();  // replaced as a whole
  std::atomic<bool> pollers_changed{false};
  std::unordered_map<std::uint64_t, std::shared_ptr<Entry>> descriptors;
  std::uint64_t next_key = 1;

  void own_turns(const std::function<bool()>& until);
  void rest();
  void take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, Deadline deadline);
  void hand_over();
  bool turn();
  void look_at_clock();
  void sweep();
  bool run_posted();
  bool run_timers();
  bool run_pollers();
  bool run_descriptors();
  enum class Turner { Waits, Leaves, Serves };  // a caller that goes on turning, one that goes, and the loop's thread
  nanoseconds time_to_wait(Deadline limit, bool progressed, Turner who);
  bool would_hold_up_a_client(Turner who);
  void sleep(nanoseconds wait) const;

  std::mutex turns_mutex;  // of who may turn
  std::condition_variable turns_changed;
  bool turning = false;
  std::atomic<int> callers{0};  // threads inside drive(); changed under the mutex, as is the next
  std::atomic<bool> stopping{false};
  std::atomic<bool> standing_by{false};                  // the loop's thread sleeps in epoll outside a turn
  Clock::time_point standing_by_until;                   // then
  Clock::time_point callers_left = Clock::time_point();  // when the last caller went
  std::atomic<std::thread::id> turner;

  // Of whoever turns.
  std::shared_ptr<const Pollers> polled = pollers;
  Clock::time_point now = Clock::now();  // as of some turns ago
  Clock::time_point last_progress;
  bool progressed_since_clock = false;  // a turn may take longer than anybody spins
  int served_on = -1;                   // the processor
  std::thread::id client;               // as last seen
  int client_cpu = -1;
  Clock::time_point client_until;
  int turns_since_look = 0;
  int turns_since_clock = 0;
};

void EventLoop::Inner::add_poller(std::shared_ptr<Entry> entry) {
  {
    std::lock_guard lock(mailbox->mutex);
    auto more = std::make_shared<Pollers>(*pollers);
    more->push_back(std::move(entry));
    pollers = std::move(more);
    pollers_changed = true;
    mailbox->take_sleeping();
  }
  mailbox->wake();
}

EventLoop::Registration& EventLoop::Registration::operator=(Registration&& other) noexcept {
  reset();
  entry_ = std::move(other.entry_);
  return *this;
}

void EventLoop::Registration::reset() noexcept {
  const auto entry = entry_.lock();
  entry_.reset();
  if (!entry || !entry->live.exchange(false)) return;
  if (entry->descriptor >= 0) epoll_ctl(entry->epoll, EPOLL_CTL_DEL, entry->descriptor, nullptr);
  entry->mailbox->discard();
}

EventLoop::Inner::Inner(std::string given_name)
    : name(std::move(given_name)), epoll(epoll_create1(EPOLL_CLOEXEC)), mailbox(std::make_shared<Mailbox>()) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeupKey;
  if (epoll < 0 || mailbox->wakeup < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, mailbox->wakeup, &event) != 0) {
    throw system_error(Blame::Busy, "event loop '" + name + "'", errno);
  }
}

EventLoop::EventLoop(const std::string& name, Thread thread) : inner_(std::make_shared<Inner>(name.substr(0, 15))) {
  if (thread == Thread::Given) return;
  thread_ = std::thread([inner = inner_] { inner->serve([] { return false; }); });
  pthread_setname_np(thread_.native_handle(), inner_->name.c_str());
}

EventLoop::~EventLoop() {
  inner_->stop();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // it ends with this turn
  } else {
    thread_.join();
  }
}

void EventLoop::Inner::stop() {
  {
    std::lock_guard lock(turns_mutex);
    stopping = true;
  }
  turns_changed.notify_all();
  mailbox->wake();
  std::vector<Task> dropped;
  std::vector<std::shared_ptr<Entry>> ended;  // destroyed outside the lock: handlers own things
  std::lock_guard lock(mailbox->mutex);
  mailbox->closed = true;
  dropped.swap(mailbox->posted);
  const auto end = [&ended](std::shared_ptr<Entry>& entry) {
    entry->live = false;
    ended.push_back(std::move(entry));
  };
  for (auto& [when, entry] : timers) end(entry);
  for (auto& [key, entry] : descriptors) end(entry);
  for (auto entry : *pollers) end(entry);
  timers.clear();
  descriptors.clear();
  pollers = std::make_shared<const Pollers>();
  pollers_changed = true;
  mailbox->rested.notify_one();
}

void EventLoop::post(Task task) {
  if (!inner_->inside()) inner_->mailbox->note_client();
  inner_->mailbox->post(std::move(task));
}

EventLoop::Registration EventLoop::at(Deadline deadline, Task task) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->task = std::move(task);
  bool must_wake = false;
  {
    std::lock_guard lock(inner_->mailbox->mutex);
    const auto place = inner_->timers.emplace(deadline.point(), entry);
    inner_->next_timer = inner_->timers.begin()->first;
    must_wake = place == inner_->timers.begin() && inner_->mailbox->take_sleeping();
  }
  if (must_wake) inner_->mailbox->wake();
  return Registration(entry);
}

EventLoop::Registration EventLoop::watch(int descriptor, std::uint32_t events, std::function<void(std::uint32_t)> handler) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->handler = std::move(handler);
  entry->epoll = inner_->epoll;
  entry->descriptor = descriptor;
  std::uint64_t key = 0;
  {
    std::lock_guard lock(inner_->mailbox->mutex);
    key = inner_->next_key++;
    inner_->descriptors.emplace(key, entry);
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(inner_->epoll, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    const int number = errno;
    std::lock_guard lock(inner_->mailbox->mutex);
    inner_->descriptors.erase(key);
    throw system_error(number == EBADF || number == EEXIST || number == EPERM ? Blame::Caller : Blame::Busy,
                       "event loop '" + inner_->name + "' cannot watch descriptor " + std::to_string(descriptor), number);
  }
  return Registration(entry);
}

EventLoop::Registration EventLoop::poll(std::function<bool()> poller, std::function<bool()> park) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->poller = std::move(poller);
  entry->park = std::move(park);
  inner_->add_poller(entry);
  return Registration(entry);
}

void EventLoop::when(const Fence& fence, Task task) {
  if (!fence.source()) return post(std::move(task));
  auto shared = std::make_shared<Task>(std::move(task));
  Task on_passed([mailbox = inner_->mailbox, shared] { mailbox->post([shared] { (*shared)(); }); });
  if (fence.source()->on_passed(on_passed)) return;
  // Nobody calls back for this fence: look at it in every turn. The poller ends itself.
  auto registration = std::make_shared<Registration>();
  auto poller = [registration, fence, shared] {
    if (!fence.query()) return false;
    registration->reset();
    (*shared)();
    return true;
  };
  // The entry is in the table only once `registration` is set.
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->poller = std::move(poller);
  *registration = Registration(entry);
  inner_->add_poller(std::move(entry));
}

bool EventLoop::inside() const { return inner_->inside(); }

bool EventLoop::drive(const std::function<bool()>& done, Deadline deadline) {
  const auto inner = inner_;  // a handler may destroy the loop meanwhile
  return inner->drive(done, deadline);
}

void EventLoop::serve(const std::function<bool()>& until) {
  const auto inner = inner_;
  inner->serve(until);
}

void EventLoop::recall() noexcept { inner_->recall(); }

bool EventLoop::Inner::drive(const std::function<bool()>& done, Deadline deadline) {
  if (inside()) {
    throw Error(Blame::Caller, "a handler on loop '" + name + "' blocks on something that only this loop can bring about");
  }
  std::unique_lock lock(turns_mutex);
  ++callers;
  while (!done() && !deadline.passed() && !stopping) {
    if (!turning) {
      take_turns(lock, done, deadline);
    } else if (deadline.is_never()) {
      turns_changed.wait(lock);
    } else {
      turns_changed.wait_until(lock, deadline.point());
    }
  }
  const bool was_last = --callers == 0;
  mailbox->note_client();
  if (was_last && !turning) {
    callers_left = now;
    hand_over();
  }
  lock.unlock();
  if (!was_last) turns_changed.notify_all();
  return done();
}

void EventLoop::Inner::take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                                  Deadline deadline) {
  turning = true;
  turner.store(std::this_thread::get_id(), std::memory_order_relaxed);
  lock.unlock();
  mailbox->attended = true;
  now = last_progress = Clock::now();
  for (;;) {
    const bool progressed = turn();
    if (done() || now >= deadline.point() || stopping) break;
    if (callers > 1 && progressed) {
      std::lock_guard guard(turns_mutex);
      turns_changed.notify_all();  // their results may have come
    }
    sleep(time_to_wait(deadline, progressed, Turner::Waits));
  }
  mailbox->attended = false;
  turner.store(std::thread::id(), std::memory_order_relaxed);
  lock.lock();
  turning = false;
}

// The last caller goes. The loop's thread may sleep, and knows nothing of what came up meanwhile.
void EventLoop::Inner::hand_over() {
  if (!standing_by) {
    std::lock_guard lock(mailbox->mutex);
    if (!mailbox->posted.empty()) mailbox->rested.notify_one();
    return;
  }
  const auto wait = time_to_wait(Deadline::never(), /*progressed=*/false, Turner::Leaves);
  if (wait.count() == 0 || (wait != nanoseconds::max() && Clock::now() + wait < standing_by_until)) mailbox->wake();
}

void EventLoop::Inner::recall() {
  bool must_wake = false;
  {
    std::lock_guard lock(turns_mutex);
    must_wake = standing_by;
  }
  turns_changed.notify_all();
  {
    std::lock_guard lock(mailbox->mutex);
    mailbox->recalled = true;
    must_wake |= mailbox->take_sleeping();
    if (mailbox->resting) mailbox->rested.notify_one();
  }
  if (must_wake) mailbox->wake();
}

void EventLoop::Inner::serve(const std::function<bool()>& until) {
  for (;;) {
    std::unique_lock lock(turns_mutex);
    if (stopping || until()) return;
    const bool may_wait = Clock::now() - callers_left < kGiveWay && !mailbox->has_posted;
    if (turning || callers > 0 || may_wait) {
      lock.unlock();
      rest();
      continue;
    }
    turning = true;
    turner.store(std::this_thread::get_id(), std::memory_order_relaxed);
    lock.unlock();
    own_turns(until);
  }
}

// Who serves has woken while callers turn, or soon after: the next caller is likely to come, and taking turns from
// each other would cost both a wake-up. Posted work ends the rest where nobody else does it.
void EventLoop::Inner::rest() {
  std::unique_lock lock(mailbox->mutex);
  if (mailbox->closed) return;
  mailbox->resting = true;
  mailbox->rested.wait_for(lock, kGiveWay);
  mailbox->resting = false;
}

// Turns until there is nothing to do, and sleeps outside the turn, so that a caller can take over without a wake-up.
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
    std::lock_guard lock(turns_mutex);
    turning = false;
    standing_by = !gives_way && callers == 0 && !stopping;
    standing_by_until = wait == nanoseconds::max() ? Clock::time_point::max() : Clock::now() + wait;
    gives_way = !standing_by;
  }
  turns_changed.notify_all();
  if (gives_way) return;
  sleep(wait);
  std::lock_guard lock(turns_mutex);
  standing_by = false;
}

void EventLoop::Inner::sweep() {
  if (!mailbox->garbage.load(std::memory_order_relaxed) || !mailbox->garbage.exchange(false)) return;
  std::vector<std::shared_ptr<Entry>> dead;  // destroyed outside the lock: handlers own things
  const auto take = [&dead](const std::shared_ptr<Entry>& entry) {
    if (entry->live) return false;
    dead.push_back(entry);
    return true;
  };
  std::lock_guard lock(mailbox->mutex);
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
  if (polled->empty() || ++turns_since_look >= kTurnsPerLook) progressed |= run_descriptors();
  return progressed;
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
    std::lock_guard lock(mailbox->mutex);
    tasks.swap(mailbox->posted);
  }
  for (Task& task : tasks) {
    task();
    task = Task();  // what a task held is gone when the next one says that it has run
  }
  return !tasks.empty();
}

bool EventLoop::Inner::run_timers() {
  if (next_timer.load() > now) return false;
  std::vector<std::shared_ptr<Entry>> due;
  {
    std::lock_guard lock(mailbox->mutex);
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
    std::shared_ptr<const Pollers> before;  // destroyed outside the lock: handlers own things
    std::lock_guard lock(mailbox->mutex);
    before = std::exchange(polled, pollers);
  }
  bool progressed = false;
  for (const auto& entry : *polled) {
    if (entry->live) progressed |= entry->poller();
  }
  return progressed;
}

// Whether the thread that serves spins, or would, on the processor of the one that called the loop: it interrupts that one,
// which waits until it sleeps again.
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

// How long whoever turned may sleep: not at all while there is something to do or to spin for. What it returns above zero
// holds as long as nobody is woken: from then on posted work, earlier timers and parked pollers bring a wake-up.
nanoseconds EventLoop::Inner::time_to_wait(Deadline limit, bool progressed, Turner who) {
  progressed_since_clock |= progressed;
  if (progressed) return nanoseconds(0);
  const bool spins = kMaySpin && (who == Turner::Waits || (!polled->empty() && !would_hold_up_a_client(who)));
  const auto spins_on = [&] {
    const auto idle = now - last_progress;
    if (!spins || idle >= kSpin) return false;
    // Where there are more threads than processors, one of them may be what a caller waits for. Who serves goes on: those
    // that it would make room for are its own agent's, and wait for what it brings.
    if (who == Turner::Waits && idle >= kShareAfter) sched_yield();
    return true;
  };
  if (spins_on()) return nanoseconds(0);
  look_at_clock();
  if (spins_on()) return nanoseconds(0);
  std::shared_ptr<const Pollers> all;
  auto until = limit.point();
  {
    std::lock_guard lock(mailbox->mutex);
    mailbox->sleeping = false;
    if (!mailbox->posted.empty() || mailbox->garbage || std::exchange(mailbox->recalled, false)) return nanoseconds(0);
    all = pollers;
    if (!timers.empty()) until = std::min(until, timers.begin()->first);
    mailbox->sleeping = true;
  }
  for (const auto& entry : *all) {
    if (!entry->live) continue;
    if (!entry->park) {
      until = std::min(until, now + kPollPause);
    } else if (!entry->park()) {
      std::lock_guard lock(mailbox->mutex);
      mailbox->sleeping = false;
      return nanoseconds(0);
    }
  }
  turns_since_look = kTurnsPerLook;  // after a sleep the descriptors and the clock come first
  turns_since_clock = kTurnsPerClock;
  if (until == Clock::time_point::max()) return nanoseconds::max();
  return std::max(nanoseconds(0), nanoseconds(until - now));
}

// epoll_wait counts in milliseconds; polling the epoll descriptor itself counts in nanoseconds.
void EventLoop::Inner::sleep(nanoseconds wait) const {
  if (wait.count() == 0) return;
  pollfd self{epoll, POLLIN, 0};
  const timespec limit{static_cast<time_t>(wait.count() / 1'000'000'000), static_cast<long>(wait.count() % 1'000'000'000)};
  ppoll(&self, 1, wait == nanoseconds::max() ? nullptr : &limit, nullptr);
}

bool EventLoop::Inner::run_descriptors() {
  turns_since_look = 0;
  epoll_event events[64];
  const int count = epoll_wait(epoll, events, 64, 0);
  bool progressed = false;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t key = events[i].data.u64;  // the structure is packed: no reference into it
    if (key == kWakeupKey) {
      if (standing_by) continue;  // it is for the thread that sleeps, which must find it there
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(mailbox->wakeup, &ignored, sizeof ignored);
      continue;
    }
    std::shared_ptr<Entry> entry;
    {
      std::lock_guard lock(mailbox->mutex);
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
