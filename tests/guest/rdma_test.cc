// What only verbs does, on a real device of the guest.
#include <array>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/conformance/connection/lanes.h>

namespace weft::conformance {
namespace {

TEST(Rdma, TheBackendIsUsableAndSaysWhatItUses) {
  const auto verbs = transport::open("verbs");
  EXPECT_THAT(verbs->describe(), testing::Contains(testing::HasSubstr("used: rxe")));
}

}  // namespace
}  // namespace weft::conformance
