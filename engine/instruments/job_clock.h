// How far the clocks of a job's processes are apart. Processes of one machine have one clock. Others ask rank 0 for its
// time, over the store, some rounds: the answer of the fastest round was given at its middle, give or take half of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <weft/base/deadline.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/transport/bootstrap.h>

namespace weft::instruments {

// The clock of a process. Tests give their own.
struct LocalClock {
  std::string host;                        // processes with the same have the same time
  std::function<std::int64_t()> now;       // nanoseconds
  std::function<std::int64_t()> calendar;  // nanoseconds since 1970, wrong by what the machines' clocks differ
};
LocalClock local_clock();

// Called by all ranks, of a job whose number of ranks is known. Throws Timeout when one does not come.
trace::timeline::Clock measure(const Participant& participant, transport::Bootstrap& store, const LocalClock& clock,
                               Deadline deadline);

}  // namespace weft::instruments
