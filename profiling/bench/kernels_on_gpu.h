// The GPU's half of kernels_bench.
#pragma once

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// The CUDA kernels against a copy on the device that moves as many bytes. Notes why, where there is
// nothing to measure.
void bench_on_gpu(Report& report);

}  // namespace weft::bench
