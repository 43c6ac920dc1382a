#include <algorithm>
#include <cerrno>
#include <ctime>

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

EventLoop::Registration& EventLoop::Registration::operator=(Registration&& other) noexcept {
  reset();
  entry_ = std::move(other.entry_);
  return *this;
}

void EventLoop::Registration::reset() noexcept {
  if (!entry_) return;
  if (entry_->live.exchange(false)) {
    if (entry_->descriptor >= 0) epoll_ctl(entry_->epoll, EPOLL_CTL_DEL, entry_->descriptor, nullptr);
    entry_->mailbox->garbage = true;
  }
  entry_.reset();
}

EventLoop::EventLoop(const std::string& name)
    : name_(name.substr(0, 15)), epoll_(epoll_create1(EPOLL_CLOEXEC)), mailbox_(std::make_shared<Mailbox>()) {
  if (epoll_ < 0 || mailbox_->wakeup < 0) throw system_error(Blame::Busy, "event loop '" + name_ + "'", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeupKey;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, mailbox_->wakeup, &event) != 0) {
    throw system_error(Blame::Busy, "event loop '" + name_ + "'", errno);
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), name_.c_str());
}

EventLoop::~EventLoop() {
  if (inside()) broken("an EventLoop was destroyed inside its own turn");
  {
    std::lock_guard lock(turns_mutex_);
    stopping_ = true;
  }
  turns_changed_.notify_all();
  mailbox_->wake();
  thread_.join();
  std::vector<Task> dropped;
  {
    std::lock_guard lock(mailbox_->mutex);
    mailbox_->closed = true;
    dropped.swap(mailbox_->posted);
  }
  for (auto& [key, entry] : descriptors_) entry->live = false;
  ::close(epoll_);
}

void EventLoop::post(Task task) { mailbox_->post(std::move(task)); }

EventLoop::Registration EventLoop::at(Deadline deadline, Task task) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = mailbox_;
  entry->task = std::move(task);
  bool must_wake = false;
  {
    std::lock_guard lock(mailbox_->mutex);
    const auto place = timers_.emplace(deadline.point(), entry);
    must_wake = place == timers_.begin() && mailbox_->take_sleeping();
  }
  if (must_wake) mailbox_->wake();
  return Registration(std::move(entry));
}

EventLoop::Registration EventLoop::watch(int descriptor, std::uint32_t events, std::function<void(std::uint32_t)> handler) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = mailbox_;
  entry->handler = std::move(handler);
  entry->epoll = epoll_;
  entry->descriptor = descriptor;
  std::uint64_t key = 0;
  {
    std::lock_guard lock(mailbox_->mutex);
    key = next_key_++;
    descriptors_.emplace(key, entry);
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    const int number = errno;
    std::lock_guard lock(mailbox_->mutex);
    descriptors_.erase(key);
    throw system_error(number == EBADF || number == EEXIST || number == EPERM ? Blame::Caller : Blame::Busy,
                       "event loop '" + name_ + "' cannot watch descriptor " + std::to_string(descriptor), number);
  }
  return Registration(std::move(entry));
}

EventLoop::Registration EventLoop::poll(std::function<bool()> poller) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = mailbox_;
  entry->poller = std::move(poller);
  {
    std::lock_guard lock(mailbox_->mutex);
    pollers_.push_back(entry);
  }
  mailbox_->wake();
  return Registration(std::move(entry));
}

void EventLoop::when(const Fence& fence, Task task) {
  if (!fence.source()) return post(std::move(task));
  auto shared = std::make_shared<Task>(std::move(task));
  Task on_passed([mailbox = mailbox_, shared] { mailbox->post([shared] { (*shared)(); }); });
  if (fence.source()->on_passed(on_passed)) return;
  // Nobody calls back for this fence: look at it in every turn. The poller ends itself.
  auto registration = std::make_shared<Registration>();
  auto poller = [registration, fence, shared] {
    if (!fence.query()) return false;
    registration->reset();
    (*shared)();
    return true;
  };
  // On the loop, so that the poller cannot run before `registration` is set.
  post([this, registration, poller = std::move(poller)] { *registration = poll(poller); });
}

bool EventLoop::inside() const { return turner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

bool EventLoop::drive(const std::function<bool()>& done, Deadline deadline) {
  if (inside()) {
    throw Error(Blame::Caller, "a handler on loop '" + name_ + "' blocks on something that only this loop can bring about");
  }
  std::unique_lock lock(turns_mutex_);
  ++callers_;
  while (!done() && !deadline.passed() && !stopping_) {
    if (!turning_) {
      take_turns(lock, done, deadline);
      continue;
    }
    if (turner_.load(std::memory_order_relaxed) == thread_.get_id()) mailbox_->wake();  // it gives way to callers
    if (deadline.is_never()) {
      turns_changed_.wait(lock);
    } else {
      turns_changed_.wait_until(lock, deadline.point());
    }
  }
  --callers_;
  lock.unlock();
  turns_changed_.notify_all();
  return done();
}

void EventLoop::run() {
  std::unique_lock lock(turns_mutex_);
  while (!stopping_) {
    if (turning_ || callers_ > 0) {
      turns_changed_.wait(lock);
      continue;
    }
    // callers_ and stopping_ are read without their lock here: whoever changes them wakes this turn.
    take_turns(lock, {}, Deadline::never());
  }
}

void EventLoop::take_turns(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done, Deadline deadline) {
  const bool is_caller = static_cast<bool>(done);
  turning_ = true;
  lock.unlock();
  turner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  for (;;) {
    turn(deadline);
    if (is_caller && (done() || deadline.passed())) break;
    std::lock_guard guard(turns_mutex_);
    if (stopping_ || (!is_caller && callers_ > 0)) break;
    if (is_caller && callers_ > 1) turns_changed_.notify_all();  // their results may have come
  }
  turner_.store(std::thread::id(), std::memory_order_relaxed);
  lock.lock();
  turning_ = false;
  turns_changed_.notify_all();
}

void EventLoop::sweep() {
  if (!mailbox_->garbage.exchange(false)) return;
  std::vector<std::shared_ptr<Entry>> dead;  // destroyed outside the lock: handlers own things
  const auto take = [&dead](const std::shared_ptr<Entry>& entry) {
    if (entry->live) return false;
    dead.push_back(entry);
    return true;
  };
  std::lock_guard lock(mailbox_->mutex);
  std::erase_if(timers_, [&](const auto& item) { return take(item.second); });
  std::erase_if(descriptors_, [&](const auto& item) { return take(item.second); });
  std::erase_if(pollers_, take);
}

void EventLoop::turn(Deadline limit) {
  sweep();
  bool progressed = run_posted();
  progressed |= run_timers();
  progressed |= run_pollers();
  progressed |= run_descriptors(time_to_wait(limit, progressed));
  if (progressed) last_progress_ = Deadline::Clock::now();
}

bool EventLoop::run_posted() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mailbox_->mutex);
    tasks.swap(mailbox_->posted);
  }
  for (Task& task : tasks) task();
  return !tasks.empty();
}

bool EventLoop::run_timers() {
  const auto now = Deadline::Clock::now();
  std::vector<std::shared_ptr<Entry>> due;
  {
    std::lock_guard lock(mailbox_->mutex);
    while (!timers_.empty() && timers_.begin()->first <= now) {
      due.push_back(std::move(timers_.begin()->second));
      timers_.erase(timers_.begin());
    }
  }
  for (const auto& entry : due) {
    if (entry->live.exchange(false)) entry->task();
  }
  return !due.empty();
}

bool EventLoop::run_pollers() {
  std::vector<std::shared_ptr<Entry>> pollers;
  {
    std::lock_guard lock(mailbox_->mutex);
    if (pollers_.empty()) return false;
    pollers = pollers_;
  }
  bool progressed = false;
  for (const auto& entry : pollers) {
    if (entry->live) progressed |= entry->poller();
  }
  return progressed;
}

std::chrono::nanoseconds EventLoop::time_to_wait(Deadline limit, bool progressed) {
  using std::chrono::nanoseconds;
  std::lock_guard lock(mailbox_->mutex);
  mailbox_->sleeping = false;
  if (progressed || !mailbox_->posted.empty()) return nanoseconds(0);
  const auto now = Deadline::Clock::now();
  auto until = limit.point();
  if (!timers_.empty()) until = std::min(until, timers_.begin()->first);
  if (!pollers_.empty()) {
    if (now - last_progress_ < kSpin) return nanoseconds(0);
    until = std::min(until, now + kPollPause);
  }
  mailbox_->sleeping = true;
  if (until == Deadline::Clock::time_point::max()) return nanoseconds::max();
  return std::max(nanoseconds(0), nanoseconds(until - now));
}

bool EventLoop::run_descriptors(std::chrono::nanoseconds wait) {
  if (wait.count() > 0) {
    // epoll_wait counts in milliseconds; polling the epoll descriptor itself counts in nanoseconds.
    pollfd self{epoll_, POLLIN, 0};
    const timespec limit{static_cast<time_t>(wait.count() / 1'000'000'000),
                         static_cast<long>(wait.count() % 1'000'000'000)};
    ppoll(&self, 1, wait == std::chrono::nanoseconds::max() ? nullptr : &limit, nullptr);
    std::lock_guard lock(mailbox_->mutex);
    mailbox_->sleeping = false;
  }
  epoll_event events[64];
  const int count = epoll_wait(epoll_, events, 64, 0);
  bool progressed = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWakeupKey) {
      std::uint64_t ignored = 0;
      [[maybe_unused]] const auto got = ::read(mailbox_->wakeup, &ignored, sizeof ignored);
      continue;
    }
    std::shared_ptr<Entry> entry;
    {
      std::lock_guard lock(mailbox_->mutex);
      const auto found = descriptors_.find(events[i].data.u64);
      if (found == descriptors_.end() || !found->second->live) continue;
      entry = found->second;
    }
    entry->handler(events[i].events);
    progressed = true;
  }
  return progressed;
}

}  // namespace weft
