// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <weft/base/make_error.h>
#include <weft/engine/call/types.h>
#include <weft/engine/call/wire.h>
#include <weft/engine/codec/values.h>

namespace weft::call {
namespace {

std::vector<std::byte> head_of(Head head, std::vector<StorageEntry> table, std::size_t body) {
  std::vector<std::byte> bytes;
  head.storages = static_cast<std::uint32_t>(table.size());
  append_head(bytes, head, table);
  bytes.resize(bytes.size() + body, std::byte{7});
  return bytes;
}

TEST(AgentWire, HeadKeepsAllFields) {
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

TEST(AgentWire, RefusesMalformedHeads) {
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
  EXPECT_FALSE(parse_head(head_of(head, {}, 1), 1)) << "a head with two bodies is accepted";
  EXPECT_TRUE(parse_head(head_of(head, {}, 0), 1));
  head.flags = 0;
  head.time_left = -1;
  EXPECT_FALSE(parse_head(head_of(head, {}, 1), 0));
}

// Heads of all kinds, some of whose bytes are changed at random. What the parser accepts lies
// within the bytes that arrived, and gives the same bytes when it is written again.
TEST(AgentWire, ChangedHeadsAreParsedInBounds) {
  std::mt19937 random(3);
  int taken = 0;
  int refused = 0;
  for (int round = 0; round < 50'000; ++round) {
    Head head;
    head.kind = static_cast<FrameKind>(1 + random() % 6);
    head.flags = random() % 4 == 0 ? kOnLoop : 0;
    head.time_left = static_cast<std::int64_t>(random());
    const std::size_t storages = random() % 4;
    auto bytes = head_of(head, std::vector<StorageEntry>(storages, {16 * (random() % 100), 0, 0}),
                         random() % 20);
    for (auto changes = random() % 3; changes > 0; --changes)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    const auto parsed = parse_head(bytes, storages);
    if (!parsed) {
      EXPECT_EQ(parsed.error().blame(), Blame::Protocol);
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
    std::vector<std::byte> again;
    append_head(again, got, table);
    again.insert(again.end(), rest.begin(), rest.end());
    ASSERT_EQ(again, bytes);
  }
  EXPECT_GT(taken, 10'000);
  EXPECT_GT(refused, 5'000);
}

// The words of docs/wire.md, with single spaces.
std::string document() {
  std::ifstream file(WEFT_TEST_WIRE_DOCUMENT);
  std::string text;
  for (std::string word; file >> word;) text += word + " ";
  return text;
}

void expect_written(const std::string& text) {
  EXPECT_NE(document().find(text), std::string::npos) << "docs/wire.md does not say: " << text;
}

// As docs/wire.md lists numbers: "0 this, 1 that".
std::string listed(const std::map<std::uint64_t, std::string>& numbers) {
  std::string text;
  for (const auto& [number, name] : numbers)
    text += (text.empty() ? "" : ", ") + std::to_string(number) + " " + name;
  return text;
}

// The given field of those that describe a tensor.
std::uint64_t field_of(const at::Tensor& tensor, std::uint32_t field) {
  const auto message = codec::Writer().write([&](codec::Packer& packer) { packer.pack(tensor); });
  const auto parsed =
      msgpack::unpack(reinterpret_cast<const char*>(message.body.data()), message.body.size());
  return parsed.get().via.array.ptr[field].as<std::uint64_t>();
}

TEST(WireDocument, ListsLimitsBlamesAndMessageKinds) {
  expect_written("the generations of both; version " + std::to_string(kWireVersion) + " |");
  expect_written("At most " + std::to_string(codec::kDeepest) +
                 " arrays and maps are in one another");
  expect_written("up to " + std::to_string(codec::kMaxApart) + " in a message");
  expect_written("| storages, *s* | 4 | at most " + std::to_string(kMaxTable) + " |");
  expect_written("| storages, *s* | 8 | at most " + std::to_string(codec::kMaxStorages) + " |");
  expect_written("larger than " + std::to_string(kMaxBodyInHeader >> 10) + " KiB");

  std::map<std::uint64_t, std::string> blames;
  for (int i = 0; i <= static_cast<int>(kLastBlame); ++i) {
    blames[static_cast<std::uint64_t>(i)] = std::string(name(static_cast<Blame>(i)));
  }
  expect_written("Blames: " + listed(blames) + ";");

  using enum MessageKind;
  std::map<std::uint64_t, std::string> kinds;
  for (const auto& [kind, name] :
       {std::pair(Call, "Call"), std::pair(Reply, "Reply"), std::pair(Create, "Create"),
        std::pair(Fetch, "Fetch"), std::pair(Fork, "Fork"), std::pair(ChildAccept, "ChildAccept"),
        std::pair(UserDelete, "UserDelete"), std::pair(ContextCleanup, "ContextCleanup"),
        std::pair(Backward, "Backward"), std::pair(Gradient, "Gradient"),
        std::pair(Shutdown, "Shutdown")}) {
    kinds[static_cast<std::uint64_t>(kind)] = name;
  }
  expect_written("Message kinds: " + listed(kinds) + ".");
}

TEST(WireDocument, ListsDtypesAndLayouts) {
  std::map<std::uint64_t, std::string> dtypes;
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    try {
      dtypes[field_of(at::empty({0}, type), 2)] = c10::toString(type);
    } catch (const std::exception&) {  // a dtype that no plain tensor has, or that cannot be sent
    }
  }
  EXPECT_GE(dtypes.size(), 21U);
  std::map<std::uint64_t, std::string> layouts;
  const at::Tensor dense = at::eye(4);
  for (const at::Tensor& tensor : {dense.to_sparse_csr(), dense.to_sparse_csc(),
                                   dense.to_sparse_bsr({2, 2}), dense.to_sparse_bsc({2, 2})}) {
    std::ostringstream name;
    name << tensor.layout();
    layouts[field_of(tensor, 2)] = name.str();
  }
  expect_written("Dtypes: " + listed(dtypes) + ". Layouts: " + listed(layouts) + ".");
}

}  // namespace
}  // namespace weft::call
