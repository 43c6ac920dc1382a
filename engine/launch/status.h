// What weft-run --status shows: a line now and then with each rank's steps, bytes and failures a second. The ranks count in
// pages that weft-run makes (profiling/trace/progress.h).
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <weft/base/deadline.h>

namespace weft::trace {
struct Progress;
}

namespace weft::launch {

class StatusLine {
 public:
  explicit StatusLine(std::chrono::milliseconds interval);
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  // A page for one more rank; what its WEFT_STATUS_FILE is to be. Throws Busy.
  std::string add(int rank);
  // The next line, if it is time for one; else "".
  std::string due();
  // What happened since the last one, whenever that was.
  std::string line();
  // What happened from the beginning on, as means over the whole time: the last line of a job.
  std::string summary();

 private:
  struct Page {
    int rank = 0;
    int descriptor = -1;
    trace::Progress* progress = nullptr;
    std::uint64_t steps = 0;  // at the last line
    std::uint64_t bytes = 0;
    std::uint64_t operations = 0;
  };
  std::string describe(Deadline::Clock::time_point since);

  const std::chrono::milliseconds interval_;
  const Deadline::Clock::time_point start_;
  Deadline::Clock::time_point last_;
  std::vector<Page> pages_;
};

}  // namespace weft::launch
