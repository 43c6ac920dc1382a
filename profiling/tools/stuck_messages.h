// Messages of a group that somebody waits in, or gave up, and those whose ends are of different
// tensors.
#pragma once

#include <vector>

#include <weft/profiling/tools/analysis.h>
#include <weft/profiling/tools/rank_evidence.h>
#include <weft/profiling/tools/waits.h>

namespace weft::tools {

// Adds to the findings, and to who waits for whom.
void find_stuck_messages(const Group& group, const Evidence& evidence, Waits& waits,
                         std::vector<Finding>& findings);

}  // namespace weft::tools
