// SPDX-License-Identifier: Apache-2.0
// The lines of weft-run --status: each rank's steps, operations and bytes a second, and the share
// of the time in which it waited for others. The ranks count in shared pages that weft-run makes
// (profiling/trace/progress.h).
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/profiling/trace/progress.h>

namespace weft::launch {

class StatusLine {
 public:
  using Now = std::function<Deadline::Clock::time_point()>;
  // Tests pass a clock of their own.
  explicit StatusLine(std::chrono::milliseconds interval, Now now = &Deadline::Clock::now);
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  // Makes a page for one more rank; returns the value for the rank's WEFT_STATUS_FILE. Throws Busy.
  std::string add(int rank);
  // Returns the next line if `interval` has passed since the last one, otherwise "".
  std::string due();
  // Returns the line for the time since the last one, however short.
  std::string line();
  // Returns the last line of a job: means over the whole time.
  std::string summary();

 private:
  using Waits = std::array<std::uint64_t, trace::Progress::kBackends>;  // nanoseconds
  struct Page {
    int rank = 0;
    int descriptor = -1;
    trace::Progress* progress = nullptr;
    std::uint64_t steps = 0;  // when the last line was made; also the members below
    std::uint64_t bytes = 0;
    std::uint64_t operations = 0;
    Waits waits{};
  };
  std::string describe(Deadline::Clock::time_point since);
  static Waits waits_of(const trace::Progress& page, Deadline::Clock::time_point now);
  static std::string waited_by_backend(const trace::Progress& page, const Waits& since,
                                       double seconds);

  const std::chrono::milliseconds interval_;
  const Now now_;
  const std::string host_;
  const Deadline::Clock::time_point start_;
  Deadline::Clock::time_point last_;
  std::vector<Page> pages_;
};

}  // namespace weft::launch
