// SPDX-License-Identifier: Apache-2.0
// Tests how the ranks of a mesh decode the entries of the store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/transport/mesh/mesh_ranks.h>
#include <weft/transport/mesh/table.h>

namespace weft::transport::mesh {
namespace {

using testing::HasSubstr;

Table table() {
  Table made{{}, "shm", {"an address", "", "another\none"}, {0, 1, 0}};
  made.token[3] = std::byte{9};
  return made;
}

TEST(MeshTable, ReadsWhatItWrote) {
  const auto read = decode_table(encode(table()), 3);
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_EQ(read.value().token, table().token);
  EXPECT_EQ(read.value().transport, "shm");
  EXPECT_EQ(read.value().addresses, table().addresses);
  EXPECT_EQ(read.value().hosts, table().hosts);
  EXPECT_EQ(decode_address(encode_address("an address")).value(), "an address");
}

TEST(MeshTable, RefusesAnotherNumberOfRanks) {
  EXPECT_THAT(decode_table(encode(table()), 4).error().text(), HasSubstr("addresses of 3 ranks"));
}

TEST(MeshTable, RefusesWhatIsCutOrTooLong) {
  auto bytes = encode(table());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const auto read = decode_table(Bytes(bytes).first(length), 3);
    ASSERT_FALSE(read) << length;
    EXPECT_EQ(read.error().blame(), Blame::Protocol);
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_table(bytes, 3));
  EXPECT_FALSE(decode_address(encode_address(std::string(kMaxAddress + 1, 'a'))));
}

TEST(MeshTable, RefusesAHostBeyondTheRanks) {
  Table made = table();
  made.hosts[1] = 3;
  EXPECT_THAT(decode_table(encode(made), 3).error().text(), HasSubstr("no valid host of rank 1"));
}

TEST(MeshTable, RefusesOneKindForAnother) {
  EXPECT_FALSE(decode_address(encode(table())));
  EXPECT_FALSE(decode_table(encode_address("an address"), 3));
}

TEST(MeshTable, RefusalIsReadAsItsText) {
  EXPECT_EQ(decode_table(encode_refusal("rank 2 is\nold"), 3).error().text(), "rank 2 is old");
}

TEST(MeshTable, RankOfAnotherVersionIsNamedOnEveryRank) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  auto old = encode_address("an address");
  old[4] = std::byte{4};
  store->set("mesh/address/2", old);
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      try {
        join_inproc(options_of(rank, 3, store));
        ADD_FAILURE() << "rank " << rank << " joined";
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::Protocol);
        EXPECT_THAT(error.text(), HasSubstr("rank 2 cannot join: it uses version 4"));
        EXPECT_THAT(error.text(), HasSubstr("the same version of Weft"));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace weft::transport::mesh
