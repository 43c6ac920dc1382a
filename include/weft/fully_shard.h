// SPDX-License-Identifier: Apache-2.0
// Sharded models: FullyShardedDataParallel, fully_shard, FullParameters. Large models: OnMeta,
// materialize, checkpointed.
#pragma once

#include <weft/engine/shard/fully_shard.h>
#include <weft/engine/training/checkpointed.h>
#include <weft/engine/training/materialize.h>
#include <weft/group.h>
