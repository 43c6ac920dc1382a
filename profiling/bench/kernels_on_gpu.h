// SPDX-License-Identifier: Apache-2.0
// The GPU cases of kernels_bench.
#pragma once

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Compares the CUDA kernels with a device copy that moves as many bytes. Notes the reason if there
// is nothing to measure.
void bench_on_gpu(Report& report);

}  // namespace weft::bench
