// SPDX-License-Identifier: Apache-2.0
// Reads the parts of a timeline (timeline_part.h describes them) and combines them: spans, threads
// and arrows of all ranks in job time.
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
  int rank = -1;           // in the group or job
  int job_rank = -1;       // rank of the process in which it is drawn
  std::vector<int> ranks;  // the members as ranks of the job
  int generation = 0;
  std::string transports{};  // "shm to rank 1"; empty if the rank was alone or did not tell
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
  std::string called_by;
  std::string lane;              // of one kind, only spans with the same lane share rows
  std::int64_t clock_error = 0;  // of a device span
  int part = 0;                  // index of the part that contains it
  std::uint64_t ticket = 0;      // in that part
  int row = 0;
};

// A range's beginning or end, or a mark, of a thread.
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
  std::size_t thread = 0;  // index in Timeline::threads
  std::int64_t time = 0;
};
// The arrows inside one part. Numbers and tickets are the part's.
struct PartArrows {
  std::map<std::uint64_t, Spot> leave;                         // by number
  std::vector<std::pair<std::uint64_t, Spot>> arrive;          // by number
  std::vector<std::pair<std::uint64_t, Spot>> from_operation;  // by ticket
  // By ticket; the operation began in a range of that thread.
  std::vector<std::pair<std::uint64_t, Spot>> to_operation;
  // By number, with the device span's ticket.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> to_device;
};

struct RankInfo {
  std::string machine;
  std::int64_t pid = 0;
  std::int64_t clock_error = 0;  // the larger one if the clock was compared twice
  bool clock_again = false;      // whether it was compared again at the end
  std::uint64_t lost = 0;
  bool ranges = true;  // whether ranges were recorded
  bool ended = false;
};

struct Timeline {
  std::vector<std::shared_ptr<Owner>> owners;
  std::vector<Span> spans;
  std::vector<ThreadRow> threads;
  std::vector<PartArrows> arrows;  // by part
  std::map<int, RankInfo> ranks;   // of processes, and of their threads if these are ranks
  int job_ranks = 0;
  // The number of parts of each job, by the job's name.
  std::map<std::string, int> jobs;
};

// Adds the contents of a part, up to the first line that no Part writes. False for a file that is
// not a part.
bool read(const std::string& path, Timeline& into);

}  // namespace weft::trace::timeline::parts
