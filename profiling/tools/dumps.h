// Flight recorders as their processes wrote them (profiling/trace/dump.h), read back for
// weft-debug.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft::tools {

struct Record {
  std::string kind;   // "collective", "send", "receive", "call", "served", …
  std::string state;  // "open", "done", "failed"
  std::string name;
  std::uint64_t sequence = 0;
  int peer = -1;  // of a collective the root
  int tag = 0;
  std::uint64_t bytes = 0;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string reduction;   // "Sum"
  std::int64_t begun = 0;  // nanoseconds since 1970, by the clock of the process's machine
  std::int64_t ended = 0;  // 0 while it is open
  std::string blame;
  std::string error;
};

// One rank of a group, or one agent, as its own process saw it.
struct View {
  std::size_t dump = 0;  // whose
  int rank = -1;
  int job_rank = -1;
  std::vector<Record> records;  // in the order in which they began
  std::string name;             // of an agent: its worker's
};

struct Dump {
  std::string file;
  std::string host;
  std::int64_t pid = 0;
  std::int64_t time = 0;  // nanoseconds since 1970
  std::string reason;
  std::int64_t knows_since =
      0;  // nanoseconds since 1970; what began before has been overwritten. 0: nothing has
  std::string process;  // tells those of one pid apart
  std::vector<std::string>
      jobs;  // that it has joined, as they are named; none where it was not in a group of several
};

struct Group {
  std::string name;
  std::uint32_t generation =
      0;  // of those of one name and the same members, whichever process has counted
  std::vector<int> ranks;     // the members as ranks of the job
  std::map<int, View> views;  // of the ranks that left a dump
};

struct Dumps {
  std::vector<Dump> dumps;
  std::vector<Group> groups;
  std::map<int, View> agents;  // by their own rank
};

// Of several dumps of one process the newest counts. Throws Caller for a file that cannot be read
// or is no dump.
Dumps read_dumps(const std::vector<std::string>& files);

// "float32 [3, 4]"; "" for an operation without a tensor.
std::string tensor_of(const Record& record);

}  // namespace weft::tools
