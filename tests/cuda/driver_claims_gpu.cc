#include <weft/tests/cuda/driver_claims.h>

namespace weft::cuda {
namespace {

Result<std::shared_ptr<const Driver>> open_real() { return Driver::open(); }

INSTANTIATE_TEST_SUITE_P(Gpu, DriverClaims, testing::Values(DriverSource{"libcuda", &open_real}));

}  // namespace
}  // namespace weft::cuda
