// SPDX-License-Identifier: Apache-2.0
// Measures how far the clocks of a job's processes are apart. Processes of one machine share a
// clock. Other processes ask rank 0 for its time, over the store, in several rounds: the answer of
// the fastest round was given at its middle, plus or minus half of it. They measure at the start
// and again at the end, because clocks drift by some 20 µs a second.
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

// The clock of a process. Tests pass their own.
struct LocalClock {
  std::string host;                   // processes with the same host share a clock
  std::function<std::int64_t()> now;  // nanoseconds
  // Nanoseconds since 1970; differs between machines as much as their calendar clocks do.
  std::function<std::int64_t()> calendar;
};
LocalClock local_clock();

constexpr auto kClockPatience = std::chrono::seconds(5);

class JobClock {
 public:
  // Measures at the start. All ranks call it, in a job whose number of ranks is known. Throws
  // Timeout if a rank does not.
  JobClock(const InstrumentedRank& participant, std::shared_ptr<transport::Bootstrap> store,
           LocalClock clock, Deadline deadline);

  const trace::timeline::Clock& at_start() const { return at_start_; }
  // Measures at the end, if this rank's clock and rank 0's differ; rank 0 answers and has nothing
  // to measure. No rank waits long for one that is gone: rank 0 waits for `patience`, and after
  // each rank that does not answer for a fifth of the time before; other ranks wait for twice
  // `patience`. Returns nothing if it measured nothing.
  std::optional<trace::timeline::Clock> at_end(
      std::chrono::milliseconds patience = kClockPatience) const noexcept;

 private:
  const int rank_;
  std::shared_ptr<transport::Bootstrap> store_;
  LocalClock clock_;
  // Ranks with another clock: on rank 0 those that ask it, on those ranks rank 0.
  std::vector<int> others_;
  trace::timeline::Clock at_start_;
};

}  // namespace weft::instruments
