// SPDX-License-Identifier: Apache-2.0
// Dumps of flight recorders (profiling/trace/dump.h), as weft-debug reads them.
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
  bool runs = true;   // false: a call that is served waits for a thread
  std::string name;
  std::uint64_t sequence = 0;
  int peer = -1;  // a collective's root
  int tag = 0;
  std::uint64_t bytes = 0;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string reduction;   // "Sum"
  std::string called_by;   // the part of the program that it belongs to
  std::int64_t begun = 0;  // nanoseconds since 1970, by the clock of the process's machine
  std::int64_t ended = 0;  // 0 if the operation was open
  std::string blame;
  std::string error;
};

// One rank of a group, or one agent, as its own process saw it.
struct View {
  std::size_t dump = 0;  // index in Dumps::dumps
  int rank = -1;
  int job_rank = -1;
  std::vector<Record> records;  // in the order in which they began
  std::string name;             // an agent's worker name
  std::string transports{};     // a group's, as its rank reaches the others: "shm to rank 1"
};

struct Dump {
  std::string file;
  std::string host;
  std::int64_t pid = 0;
  std::int64_t time = 0;  // nanoseconds since 1970
  std::string reason;
  // Nanoseconds since 1970; records of operations that began before have been overwritten. 0: none.
  std::int64_t knows_since = 0;
  std::string process;  // distinguishes processes with the same pid
  // The ids of the jobs that it has joined; none if it was not in a group of several.
  std::vector<std::string> jobs;
  // The program's ranges (weft::Range) that were open, those that began first before the others.
  struct Range {
    std::string name;
    std::int64_t begun = 0;  // nanoseconds since 1970
  };
  std::vector<Range> ranges;
};

struct Group {
  std::string name;
  // Among groups with this name and these members; equal in all processes.
  std::uint32_t generation = 0;
  std::vector<int> ranks;     // the members as ranks of the job
  std::map<int, View> views;  // by rank of the group; only ranks with a dump
};

struct Dumps {
  std::vector<Dump> dumps;
  std::vector<Group> groups;
  std::map<int, View> agents;  // by the agent's rank
};

// Reads the dumps; uses the newest of several dumps of one process. Throws Caller for a file that
// cannot be read or is not a dump.
Dumps read_dumps(const std::vector<std::string>& files);

// "float32 [3, 4]"; "" for an operation without a tensor.
std::string tensor_of(const Record& record);

}  // namespace weft::tools
