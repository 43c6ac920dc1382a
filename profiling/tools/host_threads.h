// SPDX-License-Identifier: Apache-2.0
// Computes when the threads of a rank waited for other ranks, and when they worked for them.
#pragma once

#include <optional>
#include <vector>

#include <weft/profiling/tools/intervals.h>
#include <weft/profiling/tools/timeline.h>

namespace weft::tools {

// The innermost range of a thread decides: a thread that waits may run an incoming call meanwhile,
// and that call may wait again. The program's own code outside of ranges is in neither set.
struct HostTimes {
  // At least one thread was in Work::wait, in synchronize, or waited for a future.
  Intervals waiting;
  // At least one thread ran an incoming call, a continuation, a backward pass or an optimizer's
  // step.
  Intervals serving;
};

enum class Doing { Waiting, Serving };
// The meaning of a range, by its name; nothing for other names and for ranges of the program.
std::optional<Doing> doing(const Span& range);

HostTimes host_times(const std::vector<Span>& ranges);

}  // namespace weft::tools
