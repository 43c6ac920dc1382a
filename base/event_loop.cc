// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

#include <pthread.h>

#include <weft/base/crash.h>
#include <weft/base/error.h>
#include <weft/base/event_loop_inner.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>

namespace weft {

void EventLoop::Inner::add_poller(std::shared_ptr<Entry> entry) {
  {
    MutexLock lock(mailbox->mutex);
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
  if (entry->descriptor >= 0) {
    epoll_ctl(entry->mailbox->epoll.get(), EPOLL_CTL_DEL, entry->descriptor, nullptr);
    entry->mailbox->note_watched(entry->descriptor, false);
  }
  entry->mailbox->discard();
}

EventLoop::Inner::Inner(std::string given_name) : name(std::move(given_name)) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeupKey;
  if (!mailbox->epoll || !mailbox->wakeup ||
      epoll_ctl(mailbox->epoll.get(), EPOLL_CTL_ADD, mailbox->wakeup.get(), &event) != 0) {
    throw system_error(Blame::Busy, "event loop '" + name + "'", errno);
  }
}

EventLoop::EventLoop(const std::string& name, Thread thread)
    : inner_(std::make_shared<Inner>(name.substr(0, 15))) {
  if (thread == Thread::Given) return;
  try {
    thread_ = std::thread([inner = inner_] {
      crash::prepare_thread();
      inner->serve([] { return false; });
    });
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy,
                       "event loop '" + inner_->name +
                           "' cannot start its thread; allow this user, or the container, more "
                           "threads (ulimit -u, pids.max)",
                       error.code().value());
  }
  pthread_setname_np(thread_.native_handle(), inner_->name.c_str());
}

EventLoop::~EventLoop() {
  inner_->stop();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // the thread ends with this turn
  } else {
    thread_.join();
  }
}

void EventLoop::Inner::stop() {
  {
    MutexLock lock(turns_mutex);
    stopping = true;
    while (!waiters.empty()) call(*waiters.back());
  }
  mailbox->wake();
  std::vector<Task> dropped;
  // Destroyed outside the lock, because handlers own objects.
  std::vector<std::shared_ptr<Entry>> ended;
  MutexLock lock(mailbox->mutex);
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

void EventLoop::post_soon(Task task) {
  inner_->mailbox->post(std::move(task), /*ends_rest=*/false);
}

EventLoop::Registration EventLoop::at(Deadline deadline, Task task) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->task = std::move(task);
  bool must_wake = false;
  {
    MutexLock lock(inner_->mailbox->mutex);
    const auto place = inner_->timers.emplace(deadline.point(), entry);
    inner_->next_timer = inner_->timers.begin()->first;
    must_wake = place == inner_->timers.begin() && inner_->mailbox->take_sleeping();
  }
  if (must_wake) inner_->mailbox->wake();
  return Registration(entry);
}

EventLoop::Registration EventLoop::watch(int descriptor, std::uint32_t events,
                                         std::function<void(std::uint32_t)> handler) {
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->handler = std::move(handler);
  entry->descriptor = descriptor;
  std::uint64_t key = 0;
  {
    MutexLock lock(inner_->mailbox->mutex);
    key = inner_->next_key++;
    inner_->descriptors.emplace(key, entry);
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(inner_->mailbox->epoll.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
    const int number = errno;
    MutexLock lock(inner_->mailbox->mutex);
    inner_->descriptors.erase(key);
    throw system_error(
        number == EBADF || number == EEXIST || number == EPERM ? Blame::Caller : Blame::Busy,
        "event loop '" + inner_->name + "' cannot watch descriptor " + std::to_string(descriptor),
        number);
  }
  inner_->mailbox->note_watched(descriptor, true);
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
  // No callback reports this fence, so a poller queries it in every turn. The poller ends itself.
  auto registration = std::make_shared<Registration>();
  auto poller = [registration, fence, shared] {
    if (!fence.query()) return false;
    registration->reset();
    (*shared)();
    return true;
  };
  // `registration` is set before the entry is in the table.
  auto entry = std::make_shared<Entry>();
  entry->mailbox = inner_->mailbox;
  entry->poller = std::move(poller);
  *registration = Registration(entry);
  inner_->add_poller(std::move(entry));
}

bool EventLoop::inside() const { return inner_->inside(); }

bool EventLoop::drive(const std::function<bool()>& done, Deadline deadline, const void* awaited) {
  const auto inner = inner_;  // a handler may destroy the loop meanwhile
  return inner->drive(done, deadline, awaited);
}

std::vector<EventLoop::Wait> EventLoop::waiting_since(
    std::chrono::steady_clock::time_point then) const {
  std::vector<Wait> found;
  MutexLock lock(inner_->turns_mutex);
  const auto add = [&](const Wait& wait) {
    if (wait.awaited != nullptr && wait.since <= then) found.push_back(wait);
  };
  add(inner_->turns_for);
  for (const Inner::Waiter* waiter : inner_->waiters) add(waiter->wait);
  return found;
}

void EventLoop::serve(const std::function<bool()>& until) {
  const auto inner = inner_;
  inner->serve(until);
}

void EventLoop::close_inherited() noexcept {
  Mailbox& mailbox = *inner_->mailbox;
  // The numbers may belong to other descriptors by now.
  if (mailbox.inherited_closed.exchange(true)) return;
  for (std::size_t word = 0; word < mailbox.watched.size(); ++word) {
    for (std::uint64_t bits = mailbox.watched[word].load(std::memory_order_relaxed); bits != 0;
         bits &= bits - 1) {
      ::close(static_cast<int>(word * 64) + std::countr_zero(bits));
    }
  }
  ::close(mailbox.epoll.get());
  ::close(mailbox.wakeup.get());
}

void EventLoop::recall() noexcept { inner_->recall(); }
void EventLoop::recall(const void* awaited) noexcept { inner_->recall(awaited); }

}  // namespace weft
