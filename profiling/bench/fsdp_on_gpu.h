// SPDX-License-Identifier: Apache-2.0
// Steps of a sharded model on a GPU: one rank over NCCL, compared with the plain module.
#pragma once

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Prints a note in place of rows without a GPU.
void bench_fsdp_on_gpu(Report& report);

}  // namespace weft::bench
