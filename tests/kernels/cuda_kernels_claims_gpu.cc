// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/kernels/cuda_kernels_claims.h>

namespace weft::kernels {
namespace {

Result<std::shared_ptr<const cuda::Driver>> open_real() { return cuda::Driver::open(); }

INSTANTIATE_TEST_SUITE_P(Gpu, CudaKernelsClaims,
                         testing::Values(cuda::DriverSource{"libcuda", &open_real}));

}  // namespace
}  // namespace weft::kernels
