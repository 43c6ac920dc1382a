// SPDX-License-Identifier: Apache-2.0
// Sets of times: sorted intervals that do not overlap. Microseconds.
#pragma once

#include <utility>
#include <vector>

namespace weft::tools {

using Interval = std::pair<double, double>;  // begin, end
using Intervals = std::vector<Interval>;

// Sorts the intervals and joins those that touch or overlap.
Intervals united(Intervals intervals);
// The times of `all` that are not in `some`. Both are sorted and do not overlap.
Intervals without(const Intervals& all, const Intervals& some);
// How much of the time from `begin` to `end` the intervals cover.
double within(const Intervals& intervals, double begin, double end);

}  // namespace weft::tools
