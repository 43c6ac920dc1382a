// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(Transport, ConnectionClaims, testing::ValuesIn(connecting_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ConnectionClaims);

// Reports each backend that cannot be tested on this machine, and why.
class UnusableBackend : public testing::TestWithParam<std::pair<std::string, std::string>> {};
TEST_P(UnusableBackend, IsReported) {
  GTEST_SKIP() << GetParam().first << ": " << GetParam().second;
}
INSTANTIATE_TEST_SUITE_P(Transport, UnusableBackend, testing::ValuesIn(unusable_backends()),
                         [](const auto& one) { return one.param.first; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(UnusableBackend);

}  // namespace
}  // namespace weft::conformance
