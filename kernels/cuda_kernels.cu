// SPDX-License-Identifier: Apache-2.0
// Every kernel of kernel_list.h.

#include <weft/kernels/kernel_list.h>
#include <weft/kernels/segments.h>

// __grid_constant__ keeps the parameter in place: without it, indexing makes every thread copy it
// to local memory.
#define WEFT_DEFINE_KERNEL(name, Launch, ...)                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) \
      weft_##name(const __grid_constant__ Launch<__VA_ARGS__> launch) {       \
    run_block(launch, blockIdx.x, gridDim.x, threadIdx.x);                    \
  }

#define WEFT_DEFINE_SINGLE(name, ...) WEFT_DEFINE_KERNEL(name, SingleLaunch, __VA_ARGS__)
#define WEFT_DEFINE_BOTH(name, ...)                \
  WEFT_DEFINE_KERNEL(name, FewLaunch, __VA_ARGS__) \
  WEFT_DEFINE_KERNEL(name##_many, ManyLaunch, __VA_ARGS__)

namespace weft::kernels {

WEFT_CAST_KERNELS(WEFT_DEFINE_BOTH)
WEFT_OPTIMIZER_KERNELS(WEFT_DEFINE_BOTH)
WEFT_REDUCE_KERNELS(WEFT_DEFINE_SINGLE)

}  // namespace weft::kernels
