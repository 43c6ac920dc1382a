// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/kernels/cuda_kernels_claims.h>
#include <weft/tests/kernels/fake_kernels.h>

namespace weft::kernels {
namespace {

// The fake is destroyed with the last user of its table, and then reports its complaints.
Result<std::shared_ptr<const cuda::Driver>> open_fake() {
  auto fake = std::make_shared<harness::FakeDriver>(harness::FakeDriver::Options{.threads = true});
  define_kernels(*fake);
  const cuda::Driver* const table = fake->driver().get();
  return std::shared_ptr<const cuda::Driver>(std::move(fake), table);
}

INSTANTIATE_TEST_SUITE_P(Fake, CudaKernelsClaims,
                         testing::Values(cuda::DriverSource{"threads", &open_fake}));

}  // namespace
}  // namespace weft::kernels
