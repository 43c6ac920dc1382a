// From one stream of a GPU to another, by what lies between them.
#pragma once

#include <memory>

#include <weft/cuda/device.h>
#include <weft/profiling/bench/report.h>

namespace weft::bench {

// The seconds from the end of one stream's work to the beginning of another's that waits for it: by
// a flag that the first stream raises and the second waits for (stream memory operations), by a
// host function that raises the flag, and by an event. Everything is enqueued before the first of
// it runs, so no time of the host is in it.
void bench_streams(Report& report, const std::shared_ptr<cuda::Device>& device);

}  // namespace weft::bench
