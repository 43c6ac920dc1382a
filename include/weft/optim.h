// SPDX-License-Identifier: Apache-2.0
// Optimizers and averaging over several processes: DistributedOptimizer, ZeroRedundancyOptimizer,
// average_parameters, PeriodicAverager. Optimizers with fused steps: FusedSGD, FusedAdamW.
#pragma once

#include <weft/autograd.h>
#include <weft/engine/optim/averaging.h>
#include <weft/engine/optim/distributed_optimizer.h>
#include <weft/engine/optim/fused.h>
#include <weft/engine/zero/zero.h>
#include <weft/group.h>
