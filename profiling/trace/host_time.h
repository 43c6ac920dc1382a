// How much of its time this process waits for other ranks, by the backend that it waits for: what
// weft-run --status and /metrics show, so that the rank which all others wait for can be seen. It
// is the one that waits least.
//
// A process waits while one of its threads waits (Work::wait on the host, Work::synchronize, a
// future) and none works for others (a called function, a continuation, a backward pass, a remote
// optimizer's step); a thread that waits may run calls meanwhile. What CUDA streams wait is not
// counted: the host does not wait then, and only events on the stream could tell.
//
// Nothing is counted, and a scope costs one load, until somebody asks (count_host_time).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <weft/profiling/trace/progress.h>

namespace weft::trace {

// Usable from every thread; nothing here blocks for longer than some instructions, or throws but
// for want of memory.
class HostTime {
 public:
  using Clock = std::int64_t (*)();  // nanoseconds
  explicit HostTime(Clock clock);
  HostTime(const HostTime&) = delete;
  HostTime& operator=(const HostTime&) = delete;

  // What a thread does. `backend` counts for one that waits.
  struct Doing {
    enum class What : std::uint8_t { Nothing, Waiting, Serving };
    What what = What::Nothing;
    std::size_t backend = 0;
  };
  // Of a backend's waits; those of more than Progress::kBackends are counted under the last one's
  // name.
  std::size_t place(std::string_view backend) noexcept;
  // A thread did the one, and does the other from now on.
  void change(const Doing& from, const Doing& to) noexcept;
  // A training step begins.
  void step() noexcept;

  struct Waited {
    std::string backend;
    std::int64_t nanoseconds = 0;
  };
  std::vector<Waited> waited();
  // The share of the last steps that have ended, at most kSteps of them, in which the process
  // waited: 0 to 1; NaN before there is one.
  double share_of_steps();
  static constexpr std::size_t kSteps = 32;

  // Also writes what is counted to the page that another process reads, from now on.
  void show_in(Progress& page) noexcept;
  // Tests give their own.
  void use_clock(Clock clock) noexcept;

 private:
  friend void count_host_time();
  HostTime(HostTime* parent, const Doing& of_this_thread);  // in a forked child
  void pass() noexcept;
  void count(const Doing& doing, int change) noexcept;
  void show() noexcept;
  std::int64_t total() const noexcept;

  HostTime* const parent_ =
      nullptr;  // whose mutex another thread may have held; kept, since threads there used it

  std::mutex mutex_;  // of all that follows
  Clock clock_;
  Progress* page_ = nullptr;
  std::array<std::string, Progress::kBackends> names_{};
  std::size_t known_ = 0;
  std::array<std::int64_t, Progress::kBackends> waited_{};  // nanoseconds
  std::array<int, Progress::kBackends> waiting_{};          // threads
  int serving_ = 0;                                         // threads
  std::size_t latest_ =
      0;  // the backend that a thread began to wait for last: a moment counts for one backend only
  std::int64_t last_ = 0;  // until when it has been counted
  struct Mark {
    std::int64_t time = 0;
    std::int64_t waited = 0;
  };
  std::array<Mark, kSteps + 1> marks_{};  // a ring
  std::size_t steps_ = 0;
};

// This process's. A forked child counts from 0 for itself, and not into its parent's page.
HostTime& host_time();
// From now on. Scopes that are open already count from the next one on.
void count_host_time();
// A training step begins, if anything is counted.
void count_step() noexcept;

// This thread waits while it lives.
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

// This thread works for others while it lives.
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
