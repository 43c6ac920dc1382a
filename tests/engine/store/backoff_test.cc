// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/engine/store/backoff.h>

namespace weft::group {
namespace {

using namespace std::chrono_literals;

TEST(Backoff, GrowsToTwentyMilliseconds) {
  Backoff pause;
  std::chrono::nanoseconds waited = 0ns, longest = 0ns;
  while (waited < 10min) {
    const auto next = pause.next();
    EXPECT_LE(next, waited / 2 + 50us);
    waited += next;
    longest = std::max(longest, next);
  }
  EXPECT_LE(longest, 20ms);
  EXPECT_GT(longest, 19ms);
}

TEST(Backoff, SparesNameServers) {
  auto pause = Backoff::between_lookups();
  int asked = 0;
  for (std::chrono::nanoseconds waited = 0ns; waited < 10min; waited += pause.next()) ++asked;
  EXPECT_LT(asked, 2600);
}

}  // namespace
}  // namespace weft::group
