// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <utility>

#include <pthread.h>

#include <weft/base/mutex.h>
#include <weft/profiling/trace/description.h>
#include <weft/profiling/trace/host_time.h>

namespace weft::trace {

namespace {

using What = HostTime::Doing::What;

std::atomic<bool> is_counted{false};
thread_local constinit HostTime::Doing current{};

}  // namespace

HostTime::HostTime(Clock clock) : clock_(clock), last_(clock()) {}

HostTime::HostTime(HostTime* parent, const Doing& of_this_thread)
    : parent_(parent),
      clock_(parent->clock_),
      names_(parent->names_),
      known_(parent->known_),
      last_(clock_()) {
  count(of_this_thread, 1);
}

std::size_t HostTime::place(std::string_view backend) noexcept {
  backend = backend.substr(0, Progress::kName - 1);
  MutexLock lock(mutex_);
  const auto end = names_.begin() + static_cast<std::ptrdiff_t>(known_);
  const auto found = std::find(names_.begin(), end, backend);
  if (found != end) return static_cast<std::size_t>(found - names_.begin());
  if (known_ == names_.size()) return known_ - 1;
  try {
    names_[known_] = backend;
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return known_++;
}

// Counts the time since a thread's activity last changed.
void HostTime::pass() noexcept {
  const std::int64_t now = clock_();
  if (serving_ == 0 && waiting_[latest_] > 0)
    waited_[latest_] += std::max<std::int64_t>(0, now - last_);
  last_ = now;
}

void HostTime::count(const Doing& doing, int change) noexcept {
  if (doing.what == What::Serving) serving_ += change;
  if (doing.what != What::Waiting) return;
  waiting_[doing.backend] += change;
  if (change > 0) latest_ = doing.backend;
  if (waiting_[latest_] > 0) return;
  const auto other =
      std::find_if(waiting_.begin(), waiting_.end(), [](int threads) { return threads > 0; });
  if (other != waiting_.end()) latest_ = static_cast<std::size_t>(other - waiting_.begin());
}

void HostTime::change(const Doing& from, const Doing& to) noexcept {
  MutexLock lock(mutex_);
  pass();
  count(from, -1);
  count(to, 1);
  show();
}

std::int64_t HostTime::total() const noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t one : waited_) sum += one;
  return sum;
}

void HostTime::step() noexcept {
  MutexLock lock(mutex_);
  pass();
  marks_[steps_++ % marks_.size()] = {last_, total()};
  show();
}

std::vector<HostTime::Waited> HostTime::waited() {
  MutexLock lock(mutex_);
  pass();
  std::vector<Waited> all;
  for (std::size_t i = 0; i < known_; ++i) all.push_back({names_[i], waited_[i]});
  return all;
}

double HostTime::share_of_steps() {
  MutexLock lock(mutex_);
  if (steps_ < 2) return std::numeric_limits<double>::quiet_NaN();
  const Mark& first = marks_[(steps_ - std::min(steps_, marks_.size())) % marks_.size()];
  const Mark& last = marks_[(steps_ - 1) % marks_.size()];
  if (last.time <= first.time) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(last.waited - first.waited) /
         static_cast<double>(last.time - first.time);
}

// The reader loads `waiting_since` before and after the sums: they belong to one moment if it has
// not changed.
void HostTime::show() noexcept {
  if (page_ == nullptr) return;
  page_->waiting_since = 0;
  for (std::size_t i = 0; i < known_; ++i) {
    for (std::size_t letter = 0; letter < names_[i].size(); ++letter)
      page_->backends[i].name[letter] = names_[i][letter];
    page_->backends[i].waited = static_cast<std::uint64_t>(waited_[i]);
  }
  page_->waiting_for = latest_;
  if (serving_ == 0 && waiting_[latest_] > 0) page_->waiting_since = last_;
}

void HostTime::show_in(Progress& page) noexcept {
  MutexLock lock(mutex_);
  page_ = &page;
  pass();
  show();
}

void HostTime::use_clock(Clock clock) noexcept {
  MutexLock lock(mutex_);
  clock_ = clock;
  last_ = clock();
}

namespace {

// Never destroyed, because threads may wait while the process ends.
HostTime*& own() {
  static auto* made = new HostTime(&now);
  return made;
}

}  // namespace

HostTime& host_time() { return *own(); }

void count_host_time() {
  // Holds the lock during fork, because the child copies the state that it guards. In the child,
  // only the forking thread exists.
  static const int registered =
      ::pthread_atfork([]() WEFT_UNCHECKED_LOCKING { own()->mutex_.lock(); },
                       []() WEFT_UNCHECKED_LOCKING { own()->mutex_.unlock(); },
                       [] { own() = new HostTime(own(), current); });
  static_cast<void>(registered);
  is_counted.store(true, std::memory_order_relaxed);
}

void publish_host_time() {
  count_host_time();
  host_time().show_in(progress());
}

void count_step() noexcept {
  if (is_counted.load(std::memory_order_relaxed)) host_time().step();
}

WaitScope::WaitScope(std::string_view backend) noexcept {
  if (!is_counted.load(std::memory_order_relaxed)) return;
  counts_ = true;
  before_ = std::exchange(current, {What::Waiting, host_time().place(backend)});
  host_time().change(before_, current);
}

WaitScope::~WaitScope() {
  if (!counts_) return;
  host_time().change(std::exchange(current, before_), before_);
}

ServeScope::ServeScope() noexcept {
  if (!is_counted.load(std::memory_order_relaxed)) return;
  counts_ = true;
  before_ = std::exchange(current, {What::Serving, 0});
  host_time().change(before_, current);
}

ServeScope::~ServeScope() {
  if (!counts_) return;
  host_time().change(std::exchange(current, before_), before_);
}

}  // namespace weft::trace
