// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/profiling/bench/transport_on_gpu.h>

namespace weft::bench {

std::optional<std::string> why_no_gpu() {
  return "this program was built without CUDA (WEFT_CUDA=OFF)";
}

std::shared_ptr<GpuLanes> GpuLanes::open() { throw Error(Blame::Unsupported, *why_no_gpu()); }

Participant device_copy() { throw Error(Blame::Unsupported, *why_no_gpu()); }

}  // namespace weft::bench
