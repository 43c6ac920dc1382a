// SPDX-License-Identifier: Apache-2.0
// Measures the caller's cost of a collective in addition to NCCL's own call.
#pragma once

#include <memory>

#include <weft/cuda/device.h>
#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Measures the host's time for one all_reduce of 4 B with one rank, for which NCCL has nothing to
// do: NCCL called directly on the stream, the communicator with the stream's wait for it, and
// ProcessGroup with Work::wait().
void bench_nccl(Report& report, const std::shared_ptr<cuda::Device>& device);

}  // namespace weft::bench
