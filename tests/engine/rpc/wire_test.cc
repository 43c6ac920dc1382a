#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include <weft/engine/rpc/wire.h>

namespace weft::rpc {
namespace {

std::vector<std::byte> head_of(Head head, std::vector<StorageEntry> table, std::size_t body) {
  std::vector<std::byte> bytes;
  head.storages = static_cast<std::uint32_t>(table.size());
  append_head(bytes, head, table);
  bytes.resize(bytes.size() + body, std::byte{7});
  return bytes;
}

TEST(AgentWire, KeepsAllFields) {
  Head head;
  head.kind = FrameKind::Call;
  head.flags = kOnLoop;
  head.call = 5;
  head.name = 6;
  head.signature = 7;
  head.time_left = 8;
  head.context = 9;
  const auto bytes = head_of(head, {{160, 0, 0}, {(std::uint64_t{1} << 48) - 16, 1, 7}}, 11);
  const auto parsed = parse_head(bytes, 2);
  ASSERT_TRUE(parsed) << parsed.error().what();
  const auto& got = parsed.value();
  EXPECT_EQ(got.head.call, 5U);
  EXPECT_EQ(got.head.name, 6U);
  EXPECT_EQ(got.head.signature, 7U);
  EXPECT_EQ(got.head.time_left, 8);
  EXPECT_EQ(got.head.context, 9U);
  EXPECT_EQ(got.head.flags, kOnLoop);
  ASSERT_EQ(got.table.size(), 2U);
  EXPECT_EQ(got.table[0].begin, 160U);
  EXPECT_EQ(got.table[1].begin, (std::uint64_t{1} << 48) - 16);
  EXPECT_EQ(got.table[1].device_type, 1);
  EXPECT_EQ(got.table[1].device_index, 7);
  EXPECT_EQ(got.rest.size(), 11U);
}

TEST(AgentWire, RefusesWhatDoesNotFit) {
  Head head;
  head.kind = FrameKind::Call;
  const auto good = head_of(head, {{0, 0, 0}}, 4);
  ASSERT_TRUE(parse_head(good, 1));
  EXPECT_FALSE(parse_head(good, 0));
  EXPECT_FALSE(parse_head(good, 2));
  for (std::size_t bytes = 0; bytes < sizeof(Head) + kStorageEntryBytes; ++bytes) {
    EXPECT_FALSE(parse_head(std::span(good).first(bytes), 1)) << bytes;
  }
  head.flags = kBodyAside;
  EXPECT_FALSE(parse_head(head_of(head, {}, 1), 1)) << "two bodies";
  EXPECT_TRUE(parse_head(head_of(head, {}, 0), 1));
  head.flags = 0;
  head.time_left = -1;
  EXPECT_FALSE(parse_head(head_of(head, {}, 1), 0));
}

TEST(AgentWire, NoBytesMakeItReadBeyondThem) {
  std::mt19937 random(3);
  int parsed = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::vector<std::byte> bytes(random() % 120);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random() % 4);
    if (parse_head(bytes, random() % 3)) ++parsed;
  }
  EXPECT_GE(parsed, 0);
}

}  // namespace
}  // namespace weft::rpc
