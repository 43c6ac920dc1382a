// Weft's own kernels for the fake driver: each runs the code of its .cu on the host, every block
// and thread of the grid, over the parameter that was launched.
#pragma once

#include <weft/tests/harness/fake_driver.h>

namespace weft::kernels {

// Before CudaKernels is made.
void define_kernels(harness::FakeDriver& fake);

}  // namespace weft::kernels
