// SPDX-License-Identifier: Apache-2.0
// The ranks that train a sharded model, as groups. Internal.
#pragma once

#include <array>
#include <variant>

#include <weft/engine/group/process_group.h>
#include <weft/engine/mesh/mesh.h>

namespace weft::shard {

struct ModelRanks {
  // Over a group, or a mesh of one axis, every rank has its own rows. Over a mesh of two axes rows
  // are spread along the last, and the ranks along the first have the same ones. Collective at the
  // first use of a slice. Throws Caller, naming `user`, for an empty group and for more axes.
  ModelRanks(const std::variant<ProcessGroup, Mesh>& over, const char* user);

  // The number of ranks over which gradients are averaged.
  int count() const { return shards.size() * (replicas ? replicas.size() : 1); }
  bool are_same(const ModelRanks& other) const;
  // The three groups below, in that order. Along one axis of a mesh there may be all ranks too.
  std::array<ProcessGroup, 3> groups() const { return {all, shards, replicas}; }

  ProcessGroup all;
  ProcessGroup shards;    // the ranks with the other rows
  ProcessGroup replicas;  // the ranks with the same rows; empty if there are no others
};

}  // namespace weft::shard
