#include <cstring>
#include <random>

#include <gtest/gtest.h>

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

// Whole heads of all kinds, with bytes of them changed: what is taken is within what came, and says what its bytes say.
TEST(AgentWire, ChangedHeadsAreRefusedOrTakenWithinWhatCame) {
  std::mt19937 random(3);
  int taken = 0;
  int refused = 0;
  for (int round = 0; round < 50'000; ++round) {
    Head head;
    head.kind = static_cast<FrameKind>(1 + random() % 6);
    head.flags = random() % 4 == 0 ? kOnLoop : 0;
    head.time_left = static_cast<std::int64_t>(random());
    const std::size_t storages = random() % 4;
    auto bytes = head_of(head, std::vector<StorageEntry>(storages, {16 * (random() % 100), 0, 0}), random() % 20);
    for (auto changes = random() % 3; changes > 0; --changes)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    const auto parsed = parse_head(bytes, storages);
    if (!parsed) {
      EXPECT_EQ(parsed.error().blame(), Blame::PeerLost);
      ++refused;
      continue;
    }
    ++taken;
    const auto& [got, table, rest] = parsed.value();
    ASSERT_GE(got.kind, FrameKind::Hello);
    ASSERT_LE(got.kind, FrameKind::Cancel);
    ASSERT_GE(got.time_left, 0);
    ASSERT_EQ(table.size(), got.storages);
    ASSERT_EQ(table.size() + ((got.flags & kBodyAside) != 0 ? 1 : 0), storages);
    ASSERT_EQ(sizeof(Head) + table.size() * kStorageEntryBytes + rest.size(), bytes.size());
    ASSERT_TRUE(rest.empty() || rest.data() + rest.size() == bytes.data() + bytes.size());
    // Written again it is the same.
    std::vector<std::byte> again;
    append_head(again, got, table);
    again.insert(again.end(), rest.begin(), rest.end());
    ASSERT_EQ(again, bytes);
  }
  EXPECT_GT(taken, 10'000);
  EXPECT_GT(refused, 5'000);
}

}  // namespace
}  // namespace weft::rpc
