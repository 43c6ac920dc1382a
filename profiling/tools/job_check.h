// SPDX-License-Identifier: Apache-2.0
// Checks that dumps are of one job. A rank of a group is one process, and so is an agent: if two
// dumps claim to be it, a folder of dumps was used again, and combining them would describe no real
// job. (Agent 0 need not be rank 0.)
#pragma once

#include <string>

#include <weft/base/error.h>
#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

// The error for two processes that are the same rank of a group, or the same agent; `what` names
// it: "rank 0 of group 'default'".
Error two_jobs(const Dump& one, const Dump& other, const std::string& what);

// Throws Caller if members of one group have not joined a common job, or if two processes are the
// same rank of the job in groups and no group, job of agents or chain of jobs contains both. (Ranks
// change when the survivors of a group make a new one, and another process may replace a lost one.)
void require_one_job(const Dumps& dumps);

}  // namespace weft::tools
