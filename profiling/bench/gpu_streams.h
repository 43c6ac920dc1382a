// SPDX-License-Identifier: Apache-2.0
// Measures the latency from one stream of a GPU to another.
#pragma once

#include <memory>

#include <weft/cuda/device.h>
#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Measures the seconds from the end of one stream's work to the beginning of another's that waits
// for it: by a flag that the first stream raises and the second waits for (stream memory
// operations), by a host function that raises the flag, and by an event. Enqueues everything before
// the first of it runs, so the host's time is not included.
void bench_streams(Report& report, const std::shared_ptr<cuda::Device>& device);

}  // namespace weft::bench
