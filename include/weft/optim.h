// Optimizers over several processes: DistributedOptimizer.
#pragma once

#include <weft/autograd.h>
#include <weft/engine/optim/distributed_optimizer.h>
