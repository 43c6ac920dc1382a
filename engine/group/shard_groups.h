// SPDX-License-Identifier: Apache-2.0
// Which ranks hold the other shards of a parameter, and which hold the same one. Code that computes
// over a whole gradient (its norm, whether it is finite) asks here; the code that shards parameters
// answers. Internal; any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>

namespace weft::group {

// Returns a group of the parameter, or an empty one if the parameter is in no such group.
using GroupOfParameter = ProcessGroup (*)(const at::Tensor& parameter);

// The code that shards parameters calls it before it makes the first shard. Replaces earlier
// functions.
// `shards`: the group over which the parameter is sharded; none if it is whole. `replicas`: the
// ranks that have the same shard, and step it alike; null: there are none.
void set_shard_groups(GroupOfParameter shards, GroupOfParameter replicas = nullptr);

// Returns the groups of the parameter; empty if none have been set.
ProcessGroup shard_group_of(const at::Tensor& parameter);
ProcessGroup replica_group_of(const at::Tensor& parameter);

}  // namespace weft::group
