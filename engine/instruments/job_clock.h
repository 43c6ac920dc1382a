// How far the clocks of a job's processes are apart. Processes of one machine have one clock.
// Others ask rank 0 for its time, over the store, some rounds: the answer of the fastest round was
// given at its middle, give or take half of it. At the start, and again at the end, because clocks
// drift: by some 20 µs a second.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

// The clock of a process. Tests give their own.
struct LocalClock {
  std::string host;                   // processes with the same have the same time
  std::function<std::int64_t()> now;  // nanoseconds
  std::function<std::int64_t()>
      calendar;  // nanoseconds since 1970, wrong by what the machines' clocks differ
};
LocalClock local_clock();

constexpr auto kClockPatience = std::chrono::seconds(5);

class JobClock {
 public:
  // At the start. Called by all ranks, of a job whose number of ranks is known. Throws Timeout when
  // one does not come.
  JobClock(const Participant& participant, std::shared_ptr<transport::Bootstrap> store,
           LocalClock clock, Deadline deadline);

  const trace::timeline::Clock& at_start() const { return at_start_; }
  // At the end, where a rank's clock and rank 0's differ; rank 0 answers, and has nothing to find
  // out itself. Nobody waits long for one that has gone: rank 0 for `patience`, and for each
  // further one for a fifth of what it had for the one before; the others for twice that. Nothing
  // where it was not to be had.
  std::optional<trace::timeline::Clock> at_end(
      std::chrono::milliseconds patience = kClockPatience) const noexcept;

 private:
  const int rank_;
  std::shared_ptr<transport::Bootstrap> store_;
  LocalClock clock_;
  std::vector<int> others_;  // with clocks of their own: by rank 0 those who ask it, by them rank 0
  trace::timeline::Clock at_start_;
};

}  // namespace weft::instruments
