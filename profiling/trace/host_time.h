// SPDX-License-Identifier: Apache-2.0
// How much of its time this process waits for other ranks, for each backend. weft-run --status and
// /metrics show it, so that the rank for which all others wait can be found: it is the one that
// waits least.
//
// A process waits while one of its threads waits (Work::wait on the host, Work::synchronize, a
// future) and none works for others (an incoming call, a continuation, a backward pass, a remote
// optimizer's step); a thread that waits may run calls meanwhile. The waits of CUDA streams are not
// counted: the host does not wait then, and only events on the stream could measure them.
//
// Until count_host_time() is called, nothing is counted and a scope costs one load.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/profiling/trace/progress.h>

namespace weft::trace {

// Callable from any thread. Functions hold a lock only for some instructions, and throw only
// std::bad_alloc.
class HostTime {
 public:
  using Clock = std::int64_t (*)();  // nanoseconds
  explicit HostTime(Clock clock);
  HostTime(const HostTime&) = delete;
  HostTime& operator=(const HostTime&) = delete;

  // What a thread does. `backend` is used only if the thread waits.
  struct Doing {
    enum class What : std::uint8_t { Nothing, Waiting, Serving };
    What what = What::Nothing;
    std::size_t backend = 0;
  };
  // Index of the backend in the counts. Beyond Progress::kBackends backends, the waits of all
  // others are counted under the last one's name.
  std::size_t place(std::string_view backend) noexcept;
  // Records that a thread did `from` until now and does `to` from now on.
  void change(const Doing& from, const Doing& to) noexcept;
  // Records that a training step begins.
  void step() noexcept;

  struct Waited {
    std::string backend;
    std::int64_t nanoseconds = 0;
  };
  std::vector<Waited> waited();
  // The share of time in which the process waited during the last steps that have ended, at most
  // kSteps of them: 0 to 1; NaN before the first step has ended.
  double share_of_steps();
  static constexpr std::size_t kSteps = 32;

  // From now on also writes the counts to a page that another process reads.
  void show_in(Progress& page) noexcept;
  // Sets the clock, for tests.
  void use_clock(Clock clock) noexcept;

 private:
  friend void count_host_time();
  HostTime(HostTime* parent, const Doing& of_this_thread);  // for a forked child
  void pass() noexcept WEFT_REQUIRES(mutex_);
  void count(const Doing& doing, int change) noexcept WEFT_REQUIRES(mutex_);
  void show() noexcept WEFT_REQUIRES(mutex_);
  std::int64_t total() const noexcept WEFT_REQUIRES(mutex_);

  // Not deleted, because threads of the parent used it and may have held its mutex.
  [[maybe_unused]] HostTime* const parent_ = nullptr;

  Mutex mutex_;
  Clock clock_ WEFT_GUARDED_BY(mutex_);
  Progress* page_ WEFT_GUARDED_BY(mutex_) = nullptr;
  std::array<std::string, Progress::kBackends> names_ WEFT_GUARDED_BY(mutex_){};
  std::size_t known_ WEFT_GUARDED_BY(mutex_) = 0;
  std::array<std::int64_t, Progress::kBackends> waited_ WEFT_GUARDED_BY(mutex_){};  // nanoseconds
  std::array<int, Progress::kBackends> waiting_ WEFT_GUARDED_BY(mutex_){};          // threads
  int serving_ WEFT_GUARDED_BY(mutex_) = 0;                                         // threads
  // The backend for which a thread began to wait last: a moment counts for one backend only.
  std::size_t latest_ WEFT_GUARDED_BY(mutex_) = 0;
  std::int64_t last_ WEFT_GUARDED_BY(mutex_) = 0;  // the time until which waits have been counted
  struct Mark {
    std::int64_t time = 0;
    std::int64_t waited = 0;
  };
  std::array<Mark, kSteps + 1> marks_ WEFT_GUARDED_BY(mutex_){};  // a ring
  std::size_t steps_ WEFT_GUARDED_BY(mutex_) = 0;
};

// The counts of this process. A forked child counts from 0 for itself, and not into its parent's
// page.
HostTime& host_time();
// Starts counting. A thread that is inside a scope already counts from its next scope on.
void count_host_time();
// Starts counting, and shows the counts in the page of publish_progress() too.
void publish_host_time();
// Records that a training step begins, if counting has started.
void count_step() noexcept;

// While it lives, this thread counts as waiting.
class [[nodiscard]] WaitScope {
 public:
  explicit WaitScope(std::string_view backend) noexcept;
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  HostTime::Doing before_;
  bool counts_ = false;
};

// While it lives, this thread counts as working for others.
class [[nodiscard]] ServeScope {
 public:
  ServeScope() noexcept;
  ~ServeScope();
  ServeScope(const ServeScope&) = delete;
  ServeScope& operator=(const ServeScope&) = delete;

 private:
  HostTime::Doing before_;
  bool counts_ = false;
};

}  // namespace weft::trace
