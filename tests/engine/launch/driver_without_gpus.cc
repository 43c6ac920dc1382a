// A libcuda.so.1 of a machine whose GPUs this process may not see: every function succeeds and says
// nothing, so that the number of devices stays what the caller set it to, zero.
#include <weft/cuda/driver.h>

extern "C" CUresult weft_says_nothing() { return CUDA_SUCCESS; }

// By their names in the library, which cuda.h's macros make of the functions': cuMemFree is
// cuMemFree_v2.
#define WEFT_TEXT(symbol) #symbol
#define WEFT_NAME(member, symbol) \
  asm(".globl " WEFT_TEXT(symbol) "\n.set " WEFT_TEXT(symbol) ", weft_says_nothing\n");
WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_NAME)
