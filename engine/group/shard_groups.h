// SPDX-License-Identifier: Apache-2.0
// Which ranks hold the other shards of a parameter. Code that computes over a whole gradient (its
// norm, whether it is finite) asks here; what shards parameters answers. Internal; any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <weft/engine/group/process_group.h>

namespace weft::group {

// Returns the group over which the parameter is sharded; an empty group if it is whole.
using ShardGroupOf = ProcessGroup (*)(const at::Tensor& parameter);

// What shards parameters says so before it makes the first shard. Replaces what was set before,
// which it returns; null: nothing is sharded.
ShardGroupOf set_shard_groups(ShardGroupOf shard_group_of);

// The group of the parameter; empty if nothing has been set, or the parameter is whole.
ProcessGroup shard_group_of(const at::Tensor& parameter);

}  // namespace weft::group
