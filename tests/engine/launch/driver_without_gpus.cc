// SPDX-License-Identifier: Apache-2.0
// Stands in for the libcuda.so.1 of a machine whose GPUs this process may not see. Every function
// succeeds and writes nothing, so the number of devices stays zero, as the caller set it.
#include <weft/cuda/driver.h>

extern "C" CUresult weft_says_nothing() { return CUDA_SUCCESS; }

// Exports the functions by their names in the library, which cuda.h's macros define: cuMemFree is
// cuMemFree_v2.
#define WEFT_TEXT(symbol) #symbol
#define WEFT_NAME(member, symbol) \
  asm(".globl " WEFT_TEXT(symbol) "\n.set " WEFT_TEXT(symbol) ", weft_says_nothing\n");
WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_NAME)
