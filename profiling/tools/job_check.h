// Whether dumps are of one job. A rank of a group is one process, and so is an agent: where two
// claim to be it, a folder of dumps was used again, and what would be read out of both together is
// of no job at all. (Who is agent 0 need not be rank 0.)
#pragma once

#include <string>

#include <weft/base/error.h>
#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

// Two processes that are the same rank of a group, or the same agent; `what` says of which: "rank 0
// of group 'default'".
Error two_jobs(const Dump& one, const Dump& other, const std::string& what);

// Throws Caller where members of one group have not joined one job, or two processes are the same
// rank of the job in groups, and no group, job of agents or chain of jobs has both. (Ranks change
// when the survivors of a group make a new one, and another process may come in place of one that
// was lost.)
void require_one_job(const Dumps& dumps);

}  // namespace weft::tools
