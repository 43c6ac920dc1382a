// What went wrong in a job, from the flight recorders of its ranks: who is late or missing, whose
// collectives or messages do not match, which messages do not end, which calls got no reply, who
// waits for whom in a circle, and who makes the others wait though nothing is stuck.
//
// A job that runs has operations under way: only one that has been for some time counts as waiting,
// held against the dumps of all whom it is about. One that failed counts whatever its age. Agents
// that shut down wait for each other, which is nothing wrong: those calls are left out.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

struct Finding {
  enum class What {
    Mismatch,
    MissingRank,
    LateRank,
    StuckCollective,
    StuckMessage,
    StuckBackward,
    NoReply,
    CycleOfWaits,
    SlowRank,
    Failure
  };
  What what = What::Failure;
  std::vector<int>
      ranks;  // whom it is about: of the job; of agents, as they count, where calls did not end
  std::string text;
};
const char* name(Finding::What what);

// Operations under way for less are no findings.
constexpr std::chrono::nanoseconds kOlderThan = std::chrono::seconds(1);

// The gravest first.
std::vector<Finding> analyze(const Dumps& dumps, std::chrono::nanoseconds older_than = kOlderThan);

}  // namespace weft::tools
