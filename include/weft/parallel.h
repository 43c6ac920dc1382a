// Data parallel training: DistributedDataParallel, join, DistributedSampler, DataPartitioner.
#pragma once

#include <weft/engine/parallel/comm_hooks.h>
#include <weft/engine/parallel/ddp.h>
#include <weft/engine/parallel/join.h>
#include <weft/engine/parallel/sampler.h>
#include <weft/group.h>
