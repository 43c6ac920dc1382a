// SPDX-License-Identifier: Apache-2.0
// Finds messages of a group in which a rank waits or gave up, and messages whose ends have
// different tensors.
#pragma once

#include <vector>

#include <weft/profiling/tools/analysis.h>
#include <weft/profiling/tools/rank_evidence.h>
#include <weft/profiling/tools/waits.h>

namespace weft::tools {

// Adds to `findings` and `waits`.
void find_stuck_messages(const Group& group, const Evidence& evidence, Waits& waits,
                         std::vector<Finding>& findings);

}  // namespace weft::tools
