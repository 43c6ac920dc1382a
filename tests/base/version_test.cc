// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <gtest/gtest.h>

#include <weft/version.h>

namespace weft {
namespace {

TEST(Version, LibraryAndHeaderMatchTheProject) {
  EXPECT_EQ(version(), WEFT_VERSION);
  EXPECT_STREQ(WEFT_VERSION, WEFT_TEST_PROJECT_VERSION)
      << "CMakeLists.txt reads another version from base/version.h";
}

TEST(Version, TextConsistsOfTheThreeNumbers) {
  EXPECT_EQ(WEFT_VERSION, std::to_string(WEFT_VERSION_MAJOR) + "." +
                              std::to_string(WEFT_VERSION_MINOR) + "." +
                              std::to_string(WEFT_VERSION_PATCH));
}

}  // namespace
}  // namespace weft
