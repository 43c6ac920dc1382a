// SPDX-License-Identifier: Apache-2.0
// One-sided writes change exactly the bytes they name, in order with the sends of their connection.
#include <algorithm>
#include <array>

#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

using transport::MemoryRegion;
using transport::RegionKey;

std::vector<std::string> one_sided_backends() {
  auto names = connecting_backends();
  std::erase_if(names, [](const std::string& name) {
    return !open_for_claims(name)->connector()->capabilities().one_sided;
  });
  return names;
}

class PutClaims : public ConnectionClaims {
 protected:
  // Exposes memory of the far end.
  static std::shared_ptr<MemoryRegion> expose(const ConnectionPair& pair, const Slice& memory) {
    return pair.far->one_sided()->expose(memory).value();
  }
  static Op put(const ConnectionPair& pair, const std::vector<std::byte>& from, const RegionKey& to,
                std::uint64_t offset, Fence ready = {}) {
    return pair.near->one_sided()->put(slice_of(from), to, offset, nullptr, std::move(ready));
  }
};

INSTANTIATE_TEST_SUITE_P(Transport, PutClaims, testing::ValuesIn(one_sided_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PutClaims);

TEST_P(ConnectionClaims, OneSidedMatchesCapabilities) {
  const ConnectionPair pair = open();
  EXPECT_EQ(pair.near->one_sided() != nullptr, pair.near->capabilities().one_sided);
  EXPECT_EQ(pair.far->one_sided() != nullptr, pair.far->capabilities().one_sided);
}

TEST_P(PutClaims, PutLandsBeforeTheNextMessage) {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4096}, std::size_t{200'000}, std::size_t{3} << 20}) {
    const ConnectionPair pair = open();
    Mailbox near_mail(*pair.near, pair.near_loop);
    Mailbox mail(*pair.far, pair.far_loop);
    const auto before = pattern(1, bytes + 200);
    auto memory = before;
    const auto region = expose(pair, slice_of(memory));
    // The key is sent as a message.
    const auto key = region->key().encode();
    pair.far->send(key, {}, nullptr, {});
    const auto known = RegionKey::decode(bytes_of(near_mail.next().header));
    ASSERT_TRUE(known);
    const auto from = pattern(2, bytes);
    const Op op = put(pair, from, *known, 100);
    pair.near->send(bytes_of("it is there"), {}, nullptr, {});
    EXPECT_EQ(mail.next().header, "it is there");
    expect_good(op);
    auto expected = before;
    std::copy(from.begin(), from.end(), expected.begin() + 100);
    EXPECT_TRUE(same(memory, expected)) << bytes;
  }
}

TEST_P(PutClaims, GoBothWaysBetweenMessages) {
  constexpr std::uint32_t kRounds = 50;
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox far_mail(*pair.far, pair.far_loop);
  std::vector<std::byte> at_far(kRounds * 1000);
  std::vector<std::byte> at_near(kRounds * 1000);
  const auto of_far = expose(pair, slice_of(at_far));
  const auto of_near = pair.near->one_sided()->expose(slice_of(at_near)).value();
  std::vector<std::vector<std::byte>> sources;
  for (std::uint32_t i = 0; i < 2 * kRounds; ++i) sources.push_back(pattern(i, 1000));
  std::vector<Op> ops;
  for (std::uint32_t i = 0; i < kRounds; ++i) {
    const auto payload =
        std::make_shared<const std::vector<std::byte>>(pattern(i, std::size_t{1} << (i % 20)));
    ops.push_back(put(pair, sources[2 * i], of_far->key(), i * 1000));
    ops.push_back(
        pair.near->send(bytes_of(std::to_string(i)), std::array{slice_of(*payload)}, payload, {}));
    ops.push_back(pair.far->one_sided()->put(slice_of(sources[2 * i + 1]), of_near->key(), i * 1000,
                                             nullptr, {}));
    ops.push_back(
        pair.far->send(bytes_of(std::to_string(i)), std::array{slice_of(*payload)}, payload, {}));
  }
  for (std::uint32_t i = 0; i < kRounds; ++i) {
    for (Mailbox* mail : {&far_mail, &near_mail}) {
      const Letter letter = mail->next();
      ASSERT_EQ(letter.header, std::to_string(i));
      EXPECT_TRUE(same(letter.payloads.at(0), pattern(i, std::size_t{1} << (i % 20))));
      const auto& memory = mail == &far_mail ? at_far : at_near;
      const auto& source = sources[2 * i + (mail == &far_mail ? 0 : 1)];
      EXPECT_TRUE(std::equal(source.begin(), source.end(), memory.begin() + i * 1000)) << i;
    }
  }
  for (const Op& op : ops) expect_good(op);
}

TEST_P(PutClaims, FenceHoldsBackPutAndLaterSends) {
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  std::vector<std::byte> memory(1000);
  const auto region = expose(pair, slice_of(memory));
  std::vector<std::byte> from(1000);
  const auto flag = std::make_shared<HostFlag>();
  const Op op = put(pair, from, region->key(), 0, Fence(flag));
  const Op behind = pair.near->send(bytes_of("behind"), {}, nullptr, {});
  flush(*pair.near_loop);
  EXPECT_FALSE(op.ended());
  EXPECT_FALSE(behind.ended());
  std::ranges::copy(pattern(7, 1000), from.begin());  // the memory may be read only after the fence
  flag->raise();
  EXPECT_EQ(mail.next().header, "behind");
  EXPECT_TRUE(same(memory, from));
  expect_good(op);
}

TEST_P(PutClaims, PastTheEndIsTheCallersError) {
  const ConnectionPair pair = open();
  std::vector<std::byte> memory(100);
  const auto region = expose(pair, slice_of(memory));
  const auto from = pattern(3, 60);
  for (const std::uint64_t offset :
       {std::uint64_t{41}, std::uint64_t{100}, std::uint64_t{101}, ~std::uint64_t{0}}) {
    const Error error = failure_of(put(pair, from, region->key(), offset));
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("do not fit a region of 100"), std::string::npos) << error.text();
  }
  expect_good(put(pair, {}, region->key(), 100));
  expect_good(put(pair, from, region->key(), 40));
  EXPECT_TRUE(std::equal(from.begin(), from.end(), memory.begin() + 40));
}

TEST_P(PutClaims, GpuMemoryIsRefusedByName) {
  const ConnectionPair pair = open();
  std::byte somewhere{};
  const Slice on_gpu{&somewhere, 1, Device::cuda(1)};
  const auto region = pair.far->one_sided()->expose(on_gpu);
  ASSERT_FALSE(region.ok());
  EXPECT_NE(region.error().text().find("cuda:1"), std::string::npos) << region.error().text();
  EXPECT_EQ(
      failure_of(pair.near->one_sided()->put(on_gpu, RegionKey{0, 1, 1}, 0, nullptr, {})).blame(),
      Blame::Caller);
}

TEST_P(PutClaims, PutToWithdrawnMemoryEndsConnection) {
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox far_mail(*pair.far, pair.far_loop);
  std::vector<std::byte> memory(1000);
  auto region = expose(pair, slice_of(memory));
  const auto from = pattern(4, 1000);
  expect_good(put(pair, from, region->key(), 0));
  const RegionKey key = region->key();
  region.reset();
  memory.assign(1000, std::byte{});
  EXPECT_EQ(failure_of(put(pair, from, key, 0)).blame(), Blame::PeerLost);
  EXPECT_EQ(near_mail.wait_closed().blame(), Blame::PeerLost);
  EXPECT_EQ(far_mail.wait_closed().blame(), Blame::PeerLost);
  EXPECT_TRUE(same(memory, std::vector<std::byte>(1000)));
  EXPECT_EQ(failure_of(put(pair, from, key, 0)).blame(), Blame::PeerLost)
      << "the connection recovered after it had failed";
}

TEST_P(PutClaims, ClosingFailsPendingPutsInOrder) {
  const ConnectionPair pair = open();
  std::vector<std::byte> memory(10);
  const auto region = expose(pair, slice_of(memory));
  const auto from = pattern(5, 10);
  std::vector<int> order;
  std::vector<Op> ops;
  for (int i = 0; i < 3; ++i) {
    const auto pin = std::make_shared<int>(i);
    ops.push_back(pair.near->one_sided()->put(slice_of(from), region->key(), 0, pin,
                                              Fence(std::make_shared<HostFlag>())));
    ops.back().on_ended([&order, i] { order.push_back(i); });
  }
  pair.near->close(Error(Blame::Cancelled, "enough"));
  for (const Op& op : ops) EXPECT_EQ(failure_of(op).blame(), Blame::Cancelled);
  flush(*pair.near_loop);
  EXPECT_EQ(order, (std::vector{0, 1, 2}));
  EXPECT_EQ(failure_of(put(pair, from, region->key(), 0)).blame(), Blame::Cancelled);
  EXPECT_FALSE(pair.near->one_sided()->expose(slice_of(from)).ok());
}

TEST(RegionKeys, HaveOneSizeAndRoundTrip) {
  const RegionKey key{0x0102030405060708, 1000, ~std::uint64_t{0}};
  const auto bytes = key.encode();
  EXPECT_EQ(bytes[0], std::byte{8});
  const auto back = RegionKey::decode(bytes);
  ASSERT_TRUE(back);
  EXPECT_TRUE(back->address == key.address && back->bytes == key.bytes && back->token == key.token);
  EXPECT_FALSE(RegionKey::decode(std::span(bytes).first(23)));
  EXPECT_FALSE(RegionKey::decode(pattern(1, 25)));
}

}  // namespace
}  // namespace weft::conformance
