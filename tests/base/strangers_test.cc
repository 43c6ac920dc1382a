// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include <gtest/gtest.h>

#include <weft/base/strangers.h>

namespace weft {
namespace {

constexpr std::size_t kPeers = 3;

TEST(Strangers, OldestMakesRoomForOneTooMany) {
  Strangers<std::size_t> strangers(kPeers);
  for (std::size_t one = 0; one < kPeers + kMaxStrangers; ++one) EXPECT_FALSE(strangers.add(one));
  EXPECT_EQ(strangers.add(10'000), 0U);
  EXPECT_TRUE(strangers.remove(1)) << "it has said hello";
  EXPECT_FALSE(strangers.remove(1));
  EXPECT_FALSE(strangers.add(10'001));
  EXPECT_EQ(strangers.add(10'002), 2U);
  EXPECT_EQ(strangers.take_all().size(), kPeers + kMaxStrangers);
  EXPECT_TRUE(strangers.is_empty());
}

TEST(Strangers, OneThatHasWaitedMakesRoomWithoutDescriptors) {
  Strangers<int> strangers(kPeers);
  EXPECT_FALSE(strangers.make_room());
  EXPECT_FALSE(strangers.add(1));
  EXPECT_FALSE(strangers.add(2));
  EXPECT_FALSE(strangers.make_room()) << "it may be about to say hello";
  std::optional<int> first;
  while (!first) {
    std::this_thread::yield();
    first = strangers.make_room();
  }
  EXPECT_EQ(first, 1);
}

}  // namespace
}  // namespace weft
