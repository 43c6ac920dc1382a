// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/base/log.h>

namespace weft {
namespace {

TEST(Log, CaptureSeesAllLevelsUntilItEnds) {
  std::vector<std::pair<LogLevel, std::string>> seen;
  {
    const log::Capture capture(
        [&](LogLevel level, std::string_view text) { seen.emplace_back(level, text); });
    EXPECT_TRUE(log::enabled(LogLevel::Debug));
    log::debug("a detail");
    log::error("a failure");
  }
  log::debug("not captured");
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].first, LogLevel::Debug);
  EXPECT_EQ(seen[1].second, "a failure");
}

}  // namespace
}  // namespace weft
