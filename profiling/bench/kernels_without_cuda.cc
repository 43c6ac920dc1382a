// SPDX-License-Identifier: Apache-2.0
#include <weft/profiling/bench/kernels_on_gpu.h>

namespace weft::bench {

void bench_on_gpu(Report& report) {
  report.note("no GPU cases: this program was built without CUDA (WEFT_CUDA=OFF)");
}

}  // namespace weft::bench
