// When the threads of a rank waited for other ranks, and when they worked for them.
#pragma once

#include <optional>
#include <vector>

#include <weft/profiling/tools/intervals.h>
#include <weft/profiling/tools/timeline.h>

namespace weft::tools {

// The innermost range of a thread says what the thread did at that moment: a thread that waits may
// run a called function meanwhile, and that function may wait again. The program's own code outside
// of ranges is in neither set.
struct HostTimes {
  Intervals
      waiting;  // at least one thread was in Work::wait, in synchronize, or waited for a future
  Intervals serving;  // at least one thread ran a called function, a continuation, a backward pass
                      // or an optimizer's step
};

enum class Doing { Waiting, Serving };
// What such a range says by itself; nothing for ranges of other names, nor for those of the
// program.
std::optional<Doing> doing(const Span& range);

HostTimes host_times(const std::vector<Span>& ranges);

}  // namespace weft::tools
