// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/profiling/tools/intervals.h>

namespace weft::tools {

Intervals united(Intervals intervals) {
  std::sort(intervals.begin(), intervals.end());
  Intervals result;
  for (const Interval& one : intervals) {
    if (!result.empty() && one.first <= result.back().second) {
      result.back().second = std::max(result.back().second, one.second);
    } else {
      result.push_back(one);
    }
  }
  return result;
}

Intervals without(const Intervals& all, const Intervals& some) {
  Intervals result;
  auto next = some.begin();
  for (const auto& [from, to] : all) {
    double begin = from;
    while (next != some.end() && next->second <= begin) ++next;
    // `next` may reach into the interval after this one, so it is not advanced past the last that
    // overlaps.
    for (auto other = next; other != some.end() && other->first < to; ++other) {
      if (other->first > begin) result.emplace_back(begin, other->first);
      begin = std::max(begin, other->second);
    }
    if (begin < to) result.emplace_back(begin, to);
  }
  return result;
}

double within(const Intervals& intervals, double begin, double end) {
  // Skips intervals that end before `begin` by bisection: a run has many steps and many intervals.
  auto one =
      std::partition_point(intervals.begin(), intervals.end(),
                           [&](const Interval& interval) { return interval.second <= begin; });
  double sum = 0;
  for (; one != intervals.end() && one->first < end; ++one) {
    sum += std::max(0.0, std::min(one->second, end) - std::max(one->first, begin));
  }
  return sum;
}

}  // namespace weft::tools
