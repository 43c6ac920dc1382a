// What the parts of a timeline hold (part.h says how), put together: spans, threads and arrows of
// all ranks in job time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace weft::trace::timeline::parts {

struct Owner {
  std::string kind;
  std::string name;
  int rank = -1;           // there
  int job_rank = -1;       // the process that it is drawn in
  std::vector<int> ranks;  // the members
  int generation = 0;
};

struct Span {
  std::shared_ptr<Owner> owner;  // one of Timeline::owners
  std::string kind;
  std::string name;
  std::int64_t begin = 0;  // job time
  std::int64_t end = 0;
  std::string state = "unfinished";
  std::string error;
  std::uint64_t sequence = 0;
  int peer = -1;
  int tag = 0;
  std::uint64_t bytes = 0;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string lane;              // of a kind: only spans of one lane share rows
  std::int64_t clock_error = 0;  // of a device's
  int part = 0;                  // where it stands
  std::uint64_t ticket = 0;      // there
  int row = 0;
};

// A thread's own event.
struct Point {
  char phase = 'i';
  std::int64_t time = 0;
  std::string name;
  std::string layer;
  std::uint64_t bytes = 0;
};

struct ThreadRow {
  int rank = 0;
  std::string name;
  std::vector<Point> points;
};

// Where on a thread an arrow begins or ends.
struct Spot {
  std::size_t thread = 0;  // of Timeline::threads
  std::int64_t time = 0;
};
// Arrows that a part draws by itself. Numbers and tickets are the part's.
struct PartArrows {
  std::map<std::uint64_t, Spot> leave;                         // by number
  std::vector<std::pair<std::uint64_t, Spot>> arrive;          // by number
  std::vector<std::pair<std::uint64_t, Spot>> from_operation;  // by ticket
  std::vector<std::pair<std::uint64_t, Spot>>
      to_operation;  // by ticket: begun in a range of that thread
  std::vector<std::pair<std::uint64_t, std::uint64_t>>
      to_device;  // by number, and the span's ticket
};

struct RankInfo {
  std::string machine;
  std::int64_t pid = 0;
  std::int64_t clock_error = 0;  // the larger one, where the clock was compared again
  bool clock_again = false;      // it was, at the end
  std::uint64_t lost = 0;
  bool ranges = true;  // were recorded
  bool ended = false;
};

struct Timeline {
  std::vector<std::shared_ptr<Owner>> owners;
  std::vector<Span> spans;
  std::vector<ThreadRow> threads;
  std::vector<PartArrows> arrows;  // by part
  std::map<int, RankInfo> ranks;   // of processes, and of their threads where these are ranks
  int job_ranks = 0;
  std::map<std::string, int>
      jobs;  // how many parts there are of each, by the names that they have drawn
};

// Adds what a part holds, up to the first line that no Part writes. False for a file that is no
// part.
bool read(const std::string& path, Timeline& into);

}  // namespace weft::trace::timeline::parts
