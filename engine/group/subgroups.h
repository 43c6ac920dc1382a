// SPDX-License-Identifier: Apache-2.0
// Makes groups of a group's ranks. Internal.
#pragma once

#include <string>
#include <vector>

#include <weft/engine/group/process_group.h>

namespace weft::group {

struct Core;

// Implement ProcessGroup::new_group() and ProcessGroup::split(). Block until the ranks of the new
// group have come, at most for its timeout.
ProcessGroup new_group(Core& core, const std::vector<int>& ranks,
                       const ProcessGroupOptions& wanted);
ProcessGroup split(Core& core, int color, int key);

// A part of a mesh that becomes a group.
struct MeshPart {
  std::vector<int> ranks;  // of the parent, in the order of their new ranks
  std::string name;   // "mesh1/shard of replicate[0]": once in a parent, equal on all its ranks
  std::string place;  // CoreOptions::place_in_mesh
};
// Makes the group of a part, of which this rank is one, with the options of the parent. All ranks
// of the part call it, and in any order of parts. Blocks until they have come, at most for the
// parent's timeout.
ProcessGroup make_part(const ProcessGroup& parent, const MeshPart& part);

}  // namespace weft::group
