// SPDX-License-Identifier: Apache-2.0
// Data parallel training: DistributedDataParallel, join, DistributedSampler, DataPartitioner.
#pragma once

#include <weft/engine/ddp/comm_hooks.h>
#include <weft/engine/ddp/ddp.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/ddp/power_sgd.h>
#include <weft/engine/ddp/sampler.h>
#include <weft/group.h>
