// A merged timeline, read back: what weft-timeline's summary and page are made of. Times are
// microseconds since the first event, of the job's clock.
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
  std::string kind;   // "collective", "send", …; of a thread's range its layer
  std::string group;  // or agent
  int generation = 0;
  std::uint64_t sequence = 0;
  int rank = -1;  // in the group
  int peer = -1;
  int tag = 0;
  std::uint64_t bytes = 0;
  std::string state;
  int row = 0;
};

struct RankRun {
  std::string name;              // "rank 0 on host"
  std::vector<Span> operations;  // sorted by their beginning
  std::vector<Span> ranges;      // of threads
  std::vector<double> steps;     // when each began
  std::map<int, std::string> rows;
  double end = 0;
  double clock_error = 0;    // microseconds
  bool clock_again = false;  // it was compared at the end as well, and the drift taken out
  bool has_ranges = true;    // else its program was built with WEFT_TRACE=OFF
};

struct Run {
  std::map<int, RankRun> ranks;
  std::uint64_t lost = 0;  // events there was no room for
  std::vector<int> cut;    // ranks that did not end in good order
};

// Throws Caller for a file that is no timeline of Weft.
Run read_run(const std::string& file);

}  // namespace weft::tools
