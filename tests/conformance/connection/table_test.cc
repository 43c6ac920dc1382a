// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

TEST(Connections, AtLeastInprocIsTested) {
  EXPECT_THAT(connecting_backends(), testing::Contains("inproc"));
}

}  // namespace
}  // namespace weft::conformance
