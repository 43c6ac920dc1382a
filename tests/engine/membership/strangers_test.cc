// SPDX-License-Identifier: Apache-2.0
// Connections to a rank's port that say nothing.
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <weft/engine/membership/neighbours.h>
#include <weft/tests/engine/membership/ports.h>
#include <weft/tests/harness/few_descriptors.h>

namespace weft::group {
namespace {

// The one that has been silent longest makes room. Otherwise all would keep the rank out until
// their time for a hello is over.
TEST(StrangersOfARank, KeepNoRankOutThatLacksADescriptor) {
  const auto loop = std::make_shared<EventLoop>("rank 0");
  Port own = open_port("127.0.0.1", 3);
  const Published address = own.address;
  auto rank = std::make_shared<Neighbours>(loop, 0, address, std::move(own.socket), "",
                                           Neighbours::Events{[](const Frame&) {}, [] {}});
  loop->post([rank] { rank->start(); });
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 5; ++i) strangers.push_back(dial_and_wait(address));
  // A rank says hello, and so all strangers have been taken in.
  const Descriptor first = dial_and_wait(address);
  write_frame(first, {FrameType::Hello, 1, 0, "", address.token});
  ASSERT_TRUE(awaits_bytes(first));
  {
    const harness::FewDescriptors few(1);  // for this end of the connection
    const Descriptor second = dial_and_wait(address);
    write_frame(second, {FrameType::Hello, 2, 0, "", address.token});
    ASSERT_TRUE(awaits_bytes(second));
    EXPECT_TRUE(has_ended(strangers.front()));
    EXPECT_FALSE(has_ended(strangers.back()));
  }
  loop->post([rank = std::move(rank)] {});
}

}  // namespace
}  // namespace weft::group
