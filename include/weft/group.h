// SPDX-License-Identifier: Apache-2.0
// Process groups: init_process_group, ProcessGroup, Work, ReduceOp, available_backends,
// launched_rank, spawn.
#pragma once

#include <weft/engine/group/process_group.h>
#include <weft/engine/launch/spawn.h>
#include <weft/engine/rendezvous/launcher_environment.h>
#include <weft/error.h>
