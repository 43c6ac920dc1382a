// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/engine/store/backoff.h>

namespace weft::group {
namespace {

using namespace std::chrono_literals;

TEST(Backoff, LongWaitsAskSeldomAndHearSoon) {
  for (Backoff pause : {Backoff(), Backoff::between_connections()}) {
    std::chrono::nanoseconds waited = 0ns;
    int asked = 0;
    for (; waited < 10min; ++asked) {
      const auto next = pause.next();
      EXPECT_LE(next, waited / 2 + 50us);
      EXPECT_LE(next, waited > 10s ? waited / 20 : 500ms);
      waited += next;
    }
    EXPECT_LT(asked, 2600) << "about every 250 ms after the first seconds";
  }
}

}  // namespace
}  // namespace weft::group
