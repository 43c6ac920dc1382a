// What went wrong in a job, from the flight recorders of its ranks: who is late or missing, whose collectives do not match,
// which calls got no reply, who waits for whom in a circle, and who makes the others wait though nothing is stuck.
#pragma once

#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

struct Finding {
  enum class What { Mismatch, MissingRank, LateRank, StuckCollective, NoReply, CycleOfWaits, SlowRank, Failure };
  What what = What::Failure;
  std::vector<int> ranks;  // of the job: whom it is about
  std::string text;
};
const char* name(Finding::What what);

// The gravest first.
std::vector<Finding> analyze(const Dumps& dumps);

}  // namespace weft::tools
