// SPDX-License-Identifier: Apache-2.0
// A merged timeline as weft-timeline reads it for its summary and page. Times are microseconds
// since the first event, by the job's clock.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace weft::tools {

struct Span {
  double begin = 0;
  double end = 0;
  std::string name;
  std::string kind;   // "collective", "send", …; a thread's range has its layer
  std::string group;  // the group's or agent's name
  int generation = 0;
  std::uint64_t sequence = 0;
  int rank = -1;  // in the group
  int peer = -1;
  int tag = 0;
  std::uint64_t bytes = 0;
  std::string state;
  std::string called_by;  // the part of the program that it belongs to
  int row = 0;
};

struct RankRun {
  std::string name;              // "rank 0 on host"
  std::vector<Span> operations;  // sorted by their beginning
  std::vector<Span> ranges;      // ranges of threads
  std::vector<double> steps;     // when each step began
  std::map<int, std::string> rows;
  double end = 0;
  double clock_error = 0;    // microseconds
  bool clock_again = false;  // compared at the end too, and corrected for the drift
  bool has_ranges = true;    // false: built with WEFT_TRACE=OFF
};

struct Run {
  std::map<int, RankRun> ranks;
  std::uint64_t lost = 0;  // dropped events
  std::vector<int> cut;    // ranks that did not end in good order
};

// Reads a timeline. Throws Caller for a file that is not a timeline of Weft.
Run read_run(const std::string& file);

}  // namespace weft::tools
