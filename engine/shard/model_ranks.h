// SPDX-License-Identifier: Apache-2.0
// The ranks that train a sharded model, as groups. Internal.
#pragma once

#include <variant>

#include <weft/engine/group/process_group.h>
#include <weft/engine/mesh/mesh.h>

namespace weft::shard {

struct ModelRanks {
  // Of a group, or of a mesh of one axis: every rank has its own rows. Of two: rows are spread
  // along the last, and the ranks along the first have the same ones. Collective at the first use
  // of a slice. Throws Caller, naming `user`, for an empty group and for more axes.
  ModelRanks(const std::variant<ProcessGroup, Mesh>& over, const char* user);

  // Over how many ranks gradients are averaged.
  int count() const { return shards.size() * (replicas ? replicas.size() : 1); }
  bool are_same(const ModelRanks& other) const;

  ProcessGroup all;
  ProcessGroup shards;    // the ranks with the other rows
  ProcessGroup replicas;  // the ranks with the same rows; empty if there are no others
};

}  // namespace weft::shard
