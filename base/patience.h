// SPDX-License-Identifier: Apache-2.0
// Decides when a wait for another rank or worker is reported: no wait stays silent, and none fills
// the log. For one thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/deadline.h>

namespace weft {

// The waiting times after which a wait is reported on stderr, ascending. Empty: never.
using WaitReports = std::vector<std::chrono::milliseconds>;
// Returns 10 s, 30 s, 2 min and 10 min.
inline WaitReports default_wait_reports() {
  using namespace std::chrono_literals;
  return {10s, 30s, 2min, 10min};
}

class Patience {
 public:
  using Clock = Deadline::Clock;

  explicit Patience(WaitReports reports, Clock::time_point since = Clock::now())
      : reports_(std::move(reports)), since_(since) {}

  // True if another of the times has passed since the last call that returned true.
  bool is_over() {
    const auto passed = reports_passed(reports_, waited());
    return passed > std::exchange(told_, std::max(told_, passed));
  }
  // The next of the times; never() after the last one.
  Deadline next() const {
    return told_ < reports_.size() ? Deadline::at(since_ + reports_[told_]) : Deadline::never();
  }
  std::chrono::milliseconds waited() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since_);
  }

  // Returns how many of the times have passed.
  static std::size_t reports_passed(const WaitReports& reports, std::chrono::milliseconds waited) {
    std::size_t passed = 0;
    while (passed < reports.size() && reports[passed] <= waited) ++passed;
    return passed;
  }

 private:
  const WaitReports reports_;
  const Clock::time_point since_;
  std::size_t told_ = 0;
};

// Formats a wait for a report, to the second: "10 s", "2 min".
inline std::string describe_wait(std::chrono::milliseconds waited) {
  using std::chrono::seconds;
  return describe(waited < seconds(10)
                      ? waited
                      : std::chrono::milliseconds(std::chrono::floor<seconds>(waited)));
}

}  // namespace weft
