// SPDX-License-Identifier: Apache-2.0
// Weft's own kernels for the fake driver. Each runs the code of its .cu on the host, for every
// block and thread of the grid, with the launch's parameter.
#pragma once

#include <weft/tests/harness/fake_driver.h>

namespace weft::kernels {

// Must be called before CudaKernels is made.
void define_kernels(harness::FakeDriver& fake);

}  // namespace weft::kernels
