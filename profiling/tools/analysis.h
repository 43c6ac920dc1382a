// SPDX-License-Identifier: Apache-2.0
// Finds what went wrong in a job, from the flight recorders of its ranks: ranks that are late or
// missing, collectives and messages that do not match, messages that do not end, calls without a
// reply, ranks that wait for each other in a circle, and a rank that makes the others wait although
// nothing is stuck.
//
// A running job has open operations: an operation counts as waiting only if it has been open for
// some time, by the dumps of all ranks that it concerns. A failed operation counts at any
// age. Agents that shut down wait for each other, which is no error: those calls are left out.
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
  // The ranks of the job that the finding is about; agents' ranks if it is about calls.
  std::vector<int> ranks;
  std::string text;
};
const char* name(Finding::What what);

// An operation that has been open for less is no finding.
constexpr std::chrono::nanoseconds kOlderThan = std::chrono::seconds(1);

// Returns the findings, the gravest first.
std::vector<Finding> analyze(const Dumps& dumps, std::chrono::nanoseconds older_than = kOlderThan);

}  // namespace weft::tools
