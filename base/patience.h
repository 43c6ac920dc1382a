// When somebody who waits for another rank or worker says so: nobody waits in silence, and nobody
// fills the log either. One thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/deadline.h>

namespace weft {

// After how long a wait is reported on stderr. Ascending; empty: never.
using WaitReports = std::vector<std::chrono::milliseconds>;
inline WaitReports default_wait_reports() {
  using namespace std::chrono_literals;
  return {10s, 30s, 2min, 10min};
}

class Patience {
 public:
  using Clock = Deadline::Clock;

  explicit Patience(WaitReports reports, Clock::time_point since = Clock::now())
      : reports_(std::move(reports)), since_(since) {}

  // Whether another of the times has passed, since the last call that said so.
  bool is_over() {
    const auto passed = reports_passed(reports_, waited());
    return passed > std::exchange(told_, std::max(told_, passed));
  }
  // The next of the times; never() behind the last one.
  Deadline next() const {
    return told_ < reports_.size() ? Deadline::at(since_ + reports_[told_]) : Deadline::never();
  }
  std::chrono::milliseconds waited() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since_);
  }

  // How many of the times are over.
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

// "10 s", "2 min": a wait to the second, as it is reported.
inline std::string describe_wait(std::chrono::milliseconds waited) {
  using std::chrono::seconds;
  return describe(waited < seconds(10)
                      ? waited
                      : std::chrono::milliseconds(std::chrono::floor<seconds>(waited)));
}

}  // namespace weft
