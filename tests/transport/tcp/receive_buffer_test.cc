// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/transport/tcp/receive_buffer.h>

namespace weft::transport::tcp {
namespace {

void put(ReceiveBuffer& buffer, const std::string& text, std::size_t wanted) {
  const auto room = buffer.room(wanted);
  ASSERT_GE(room.size(), text.size());
  std::memcpy(room.data(), text.data(), text.size());
  buffer.filled(text.size());
}

std::string content(const ReceiveBuffer& buffer) {
  const auto bytes = buffer.content();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(ReceiveBuffer, AllocatesOnDemandAndReleases) {
  ReceiveBuffer buffer(16);
  EXPECT_FALSE(buffer.has_memory());
  EXPECT_TRUE(buffer.content().empty());
  put(buffer, "abc", 1);
  EXPECT_TRUE(buffer.has_memory());
  buffer.release();
  EXPECT_EQ(content(buffer), "abc") << "release() dropped bytes that were not consumed";
  buffer.consume(3);
  buffer.release();
  EXPECT_FALSE(buffer.has_memory());
}

TEST(ReceiveBuffer, MovesContentToTheFrontForRoom) {
  ReceiveBuffer buffer(8);
  put(buffer, "abcdefgh", 8);
  buffer.consume(6);
  put(buffer, "ijkl", 6);
  EXPECT_EQ(content(buffer), "ghijkl");
  EXPECT_EQ(buffer.room(8).size(), 2u);
}

TEST(ReceiveBuffer, GivesOutNoMoreThanItHas) {
  ReceiveBuffer buffer(8);
  put(buffer, "abc", 1);
  std::byte some[2];
  EXPECT_EQ(buffer.take(some), 2u);
  EXPECT_EQ(content(buffer), "c");
  std::byte many[8];
  EXPECT_EQ(buffer.take(many), 1u);
  EXPECT_EQ(buffer.take(many), 0u);
  buffer.consume(5);
  EXPECT_TRUE(buffer.empty());
}

}  // namespace
}  // namespace weft::transport::tcp
