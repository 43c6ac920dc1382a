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
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>

namespace weft {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);      // after progress, with pollers
constexpr auto kPollPause = std::chrono::microseconds(50);  // between looks, with pollers
constexpr std::uint64_t kWakeupKey = 0;

}  // namespace

struct EventLoop::Mailbox {
  Mailbox() : wakeup(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Mailbox() { ::close(wakeup); }

  void wake() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wakeup, &one, sizeof one);  // full means already woken
  }

  // Returns whether somebody must be woken; the flag is cleared because one wake-up is enough.
  bool take_sleeping() { return std::exchange(sleeping, false); }

  void post(Task task) {
    bool must_wake = false;
    {
      std::lock_guard lock(mutex);
      if (closed) return;
      posted.push_back(std::move(task));
      must_wake = take_sleeping();
    }
    if (must_wake) wake();
  }

  const int wakeup;
  std::atomic<bool> garbage{false};  // an entry died and is still in a table
  std::mutex mutex;
  std::vector<Task> posted;
  bool sleeping = false;  // the turner is, or is about to be, inside epoll
  bool closed = false;
};

struct EventLoop::Entry {
  std::shared_ptr<Mailbox> mailbox;
  std::atomic<bool> live{true};
  Task task;                                   // timers
  std::function<void(std::uint32_t)> handler;  // descriptors
  std::function<bool()> poller;                // pollers
  int epoll = -1;
  int descriptor = -1;
};

struct EventLoop::Inner {
  explicit Inner(std::string given_name);
  ~Inner() { ::close(epoll); }
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  void run();
  bool drive(const std::function<bool()>& done, Deadline deadline);
  bool inside() const { return turner.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  void stop();
  void add_poller(std::shared_ptr<Entry> entry);

  const std::string name;
  const int epoll;
  const std::shared_ptr<Mailbox> mailbox;  // its mutex guards the tables below as well
  std::multimap<Deadline::Clock::time_point, std::shared_ptr<Entry>> timers;
  std::vector<std::shared_ptr<Entry>> pollers;
  std::unordered_map<std::uint64_t, std::shared_ptr<Entry>> descriptors;
  std::uint64_t next_key = 1;
  std::atomic<std::thread::id> own_thread;

  void turn(Deadline limit);
  void sweep();
  bool run_posted();
  bool run_timers();
  bool run_pollers();
  bool run_descriptors(std::chrono::nanoseconds wait);
  std::chrono::nanoseconds time_to_wait(Deadline limit, bool progressed);
  void take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, Deadline deadline);

  std::mutex turns_mutex;  // of who may turn
  std::condition_variable turns_changed;
  bool turning = false;
  int callers = 0;  // threads inside drive()
  bool stopping = false;
  std::atomic<std::thread::id> turner;
  Deadline::Clock::time_point last_progress;
};

void EventLoop::Inner::add_poller(std::shared_ptr<Entry> entry) {
  {
    std::lock_guard lock(mailbox->mutex);
    pollers.push_back(std::move(entry));
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
  entry->mailbox->garbage = true;
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

EventLoop::EventLoop(const std::string& name) : inner_(std::make_shared<Inner>(name.substr(0, 15))) {
  thread_ = std::thread([inner = inner_] {
    inner->own_thread = std::this_thread::get_id();
    inner->run();
  });
  pthread_setname_np(thread_.native_handle(), inner_->name.c_str());
}

EventLoop::~EventLoop() {
  inner_->stop();
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
  for (auto& entry : pollers) end(entry);
  timers.clear();
  descriptors.clear();
  pollers.clear();
}

void EventLoop::post(Task task) { inner_->mailbox->post(std::move(task)); }

EventLoop::Registration EventLoop::at(Deadline deadline, Task task) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->task = std::move(task);
  bool must_wake = false;
  {
    std::lock_guard lock(inner_->mailbox->mutex);
    const auto place = inner_->timers.emplace(deadline.point(), entry);
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

EventLoop::Registration EventLoop::poll(std::function<bool()> poller) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->poller = std::move(poller);
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

bool EventLoop::Inner::drive(const std::function<bool()>& done, Deadline deadline) {
  if (inside()) {
    throw Error(Blame::Caller, "a handler on loop '" + name + "' blocks on something that only this loop can bring about");
  }
  std::unique_lock lock(turns_mutex);
  ++callers;
  while (!done() && !deadline.passed() && !stopping) {
    if (!turning) {
      take_turns(lock, done, deadline);
      continue;
    }
    if (turner.load(std::memory_order_relaxed) == own_thread.load()) mailbox->wake();  // it gives way to callers
    if (deadline.is_never()) {
      turns_changed.wait(lock);
    } else {
      turns_changed.wait_until(lock, deadline.point());
    }
  }
  --callers;
  lock.unlock();
  turns_changed.notify_all();
  return done();
}

void EventLoop::Inner::run() {
  std::unique_lock lock(turns_mutex);
  while (!stopping) {
    if (turning || callers > 0) {
      turns_changed.wait(lock);
      continue;
    }
    // callers and stopping are read without their lock here: whoever changes them wakes this turn.
    take_turns(lock, {}, Deadline::never());
  }
}

void EventLoop::Inner::take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                                  Deadline deadline) {
  const bool is_caller = static_cast<bool>(done);
  turning = true;
  turner.store(std::this_thread::get_id(), std::memory_order_relaxed);  // before unlocking: who waits asks whom to wake
  lock.unlock();
  for (;;) {
    turn(deadline);
    if (is_caller && (done() || deadline.passed())) break;
    std::lock_guard guard(turns_mutex);
    if (stopping || (!is_caller && callers > 0)) break;
    if (is_caller && callers > 1) turns_changed.notify_all();  // their results may have come
  }
  turner.store(std::thread::id(), std::memory_order_relaxed);
  lock.lock();
  turning = false;
  turns_changed.notify_all();
}

void EventLoop::Inner::sweep() {
  if (!mailbox->garbage.exchange(false)) return;
  std::vector<std::shared_ptr<Entry>> dead;  // destroyed outside the lock: handlers own things
  const auto take = [&dead](const std::shared_ptr<Entry>& entry) {
    if (entry->live) return false;
    dead.push_back(entry);
    return true;
  };
  std::lock_guard lock(mailbox->mutex);
  std::erase_if(timers, [&](const auto& item) { return take(item.second); });
  std::erase_if(descriptors, [&](const auto& item) { return take(item.second); });
  std::erase_if(pollers, take);
}

void EventLoop::Inner::turn(Deadline limit) {
  sweep();
  bool progressed = run_posted();
  progressed |= run_timers();
  progressed |= run_pollers();
  progressed |= run_descriptors(time_to_wait(limit, progressed));
  if (progressed) last_progress = Deadline::Clock::now();
}

bool EventLoop::Inner::run_posted() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mailbox->mutex);
    tasks.swap(mailbox->posted);
  }
  for (Task& task : tasks) task();
  return !tasks.empty();
}

bool EventLoop::Inner::run_timers() {
  const auto now = Deadline::Clock::now();
  std::vector<std::shared_ptr<Entry>> due;
  {
    std::lock_guard lock(mailbox->mutex);
    while (!timers.empty() && timers.begin()->first <= now) {
      due.push_back(std::move(timers.begin()->second));
      timers.erase(timers.begin());
    }
  }
  for (const auto& entry : due) {
    if (entry->live.exchange(false)) entry->task();
  }
  return !due.empty();
}

bool EventLoop::Inner::run_pollers() {
  std::vector<std::shared_ptr<Entry>> now;
  {
    std::lock_guard lock(mailbox->mutex);
    if (pollers.empty()) return false;
    now = pollers;
  }
  bool progressed = false;
  for (const auto& entry : now) {
    if (entry->live) progressed |= entry->poller();
  }
  return progressed;
}

std::chrono::nanoseconds EventLoop::Inner::time_to_wait(Deadline limit, bool progressed) {
  using std::chrono::nanoseconds;
  std::lock_guard lock(mailbox->mutex);
  mailbox->sleeping = false;
  if (progressed || !mailbox->posted.empty()) return nanoseconds(0);
  const auto now = Deadline::Clock::now();
  auto until = limit.point();
  if (!timers.empty()) until = std::min(until, timers.begin()->first);
  if (!pollers.empty()) {
    if (now - last_progress < kSpin) return nanoseconds(0);
    until = std::min(until, now + kPollPause);
  }
  mailbox->sleeping = true;
  if (until == Deadline::Clock::time_point::max()) return nanoseconds::max();
  return std::max(nanoseconds(0), nanoseconds(until - now));
}

bool EventLoop::Inner::run_descriptors(std::chrono::nanoseconds wait) {
  if (wait.count() > 0) {
    // epoll_wait counts in milliseconds; polling the epoll descriptor itself counts in nanoseconds.
    pollfd self{epoll, POLLIN, 0};
    const timespec limit{static_cast<time_t>(wait.count() / 1'000'000'000),
                         static_cast<long>(wait.count() % 1'000'000'000)};
    ppoll(&self, 1, wait == std::chrono::nanoseconds::max() ? nullptr : &limit, nullptr);
    std::lock_guard lock(mailbox->mutex);
    mailbox->sleeping = false;
  }
  epoll_event events[64];
  const int count = epoll_wait(epoll, events, 64, 0);
  bool progressed = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWakeupKey) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(mailbox->wakeup, &ignored, sizeof ignored);
      continue;
    }
    std::shared_ptr<Entry> entry;
    {
      std::lock_guard lock(mailbox->mutex);
      const auto found = descriptors.find(events[i].data.u64);
      if (found == descriptors.end() || !found->second->live) continue;
      entry = found->second;
    }
    entry->handler(events[i].events);
    progressed = true;
  }
  return progressed;
}

}  // namespace weft
