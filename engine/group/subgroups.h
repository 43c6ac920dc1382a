// SPDX-License-Identifier: Apache-2.0
// Makes groups of a group's ranks. Internal.
#pragma once

#include <vector>

#include <weft/engine/group/process_group.h>

namespace weft::group {

struct Core;

// Implement ProcessGroup::new_group() and ProcessGroup::split(). Block until the ranks of the new
// group have come, at most for its timeout.
ProcessGroup new_group(Core& core, const std::vector<int>& ranks,
                       const ProcessGroupOptions& wanted);
ProcessGroup split(Core& core, int color, int key);

}  // namespace weft::group
