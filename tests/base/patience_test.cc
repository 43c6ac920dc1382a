// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/base/patience.h>

namespace weft {
namespace {

using namespace std::chrono_literals;
using Clock = Patience::Clock;

TEST(Patience, IsOverOnceForEachTime) {
  Patience fresh({1h, 2h});
  EXPECT_FALSE(fresh.is_over());
  Patience one({1h, 2h}, Clock::now() - 90min);
  EXPECT_TRUE(one.is_over());
  EXPECT_FALSE(one.is_over()) << "it has already reported this time";
  Patience both({1h, 2h}, Clock::now() - 3h);
  EXPECT_TRUE(both.is_over());
  EXPECT_FALSE(both.is_over()) << "two times that have passed are one report";
}

TEST(Patience, KnowsItsNextTime) {
  const auto since = Clock::now() - 90min;
  Patience patience({1h, 2h}, since);
  EXPECT_EQ(patience.next().point(), since + 1h);
  EXPECT_TRUE(patience.is_over());
  EXPECT_EQ(patience.next().point(), since + 2h);
  EXPECT_FALSE(patience.is_over());
  EXPECT_EQ(patience.next().point(), since + 2h);
}

TEST(Patience, WithoutTimesIsNeverOver) {
  Patience patience({}, Clock::now() - 1000h);
  EXPECT_FALSE(patience.is_over());
  EXPECT_TRUE(patience.next().is_never());
}

TEST(Patience, IsReportedToTheSecond) {
  EXPECT_EQ(describe_wait(120ms), "120 ms");
  EXPECT_EQ(describe_wait(10'480ms), "10 s");
  EXPECT_EQ(describe_wait(120'999ms), "2 min");
}

}  // namespace
}  // namespace weft
