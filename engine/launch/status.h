// What weft-run --status shows: a line now and then with each rank's steps, operations and bytes a
// second, and the share of the time in which it waited for others. The ranks count in pages that
// weft-run makes (profiling/trace/progress.h).
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
  // Tests give a clock of their own.
  explicit StatusLine(std::chrono::milliseconds interval, Now now = &Deadline::Clock::now);
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
  using Waits = std::array<std::uint64_t, trace::Progress::kBackends>;  // nanoseconds
  struct Page {
    int rank = 0;
    int descriptor = -1;
    trace::Progress* progress = nullptr;
    std::uint64_t steps = 0;  // at the last line
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
