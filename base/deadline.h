// SPDX-License-Identifier: Apache-2.0
// A point in time by which something must have happened. It is made once, by the outermost caller,
// and passed down, so that a chain of calls shares one limit.
#pragma once

#include <chrono>
#include <string>

#include <time.h>

#include <weft/base/export.h>

namespace weft {

// Returns the time to within a few milliseconds, at a tenth of the cost of steady_clock::now().
inline std::chrono::steady_clock::time_point coarse_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return std::chrono::steady_clock::time_point(std::chrono::seconds(now.tv_sec) +
                                               std::chrono::nanoseconds(now.tv_nsec));
}

// Formats a limit for a message: "300 ms", "1.5 s", "30 min".
WEFT_API std::string describe(std::chrono::milliseconds duration);

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline never() { return Deadline(Clock::time_point::max()); }
  static Deadline at(Clock::time_point point) { return Deadline(point); }
  // Returns never() if the clock cannot represent the result: users write milliseconds::max() for
  // "no limit".
  template <class Rep, class Period>
  static Deadline in(std::chrono::duration<Rep, Period> duration) {
    using Duration = std::chrono::duration<Rep, Period>;
    const auto now = Clock::now();
    // Compared in the duration's own unit: milliseconds::max() overflows as nanoseconds.
    if (duration >= std::chrono::floor<Duration>(Clock::time_point::max() - now)) return never();
    return Deadline(now + std::chrono::duration_cast<Clock::duration>(duration));
  }

  bool is_never() const { return point_ == Clock::time_point::max(); }
  bool passed() const { return !is_never() && Clock::now() >= point_; }
  Clock::time_point point() const { return point_; }

  // Time left, rounded up, never negative; milliseconds::max() for never().
  std::chrono::milliseconds remaining() const {
    if (is_never()) return std::chrono::milliseconds::max();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(point_ - Clock::now());
    return left.count() < 0 ? std::chrono::milliseconds(0) : left;
  }

  static Deadline sooner(Deadline a, Deadline b) { return a.point_ < b.point_ ? a : b; }

 private:
  explicit Deadline(Clock::time_point point) : point_(point) {}
  Clock::time_point point_;
};

}  // namespace weft
