// SPDX-License-Identifier: Apache-2.0
// Sharded models: FullyShardedDataParallel, fully_shard, FullParameters.
#pragma once

#include <weft/engine/shard/fully_shard.h>
#include <weft/group.h>
