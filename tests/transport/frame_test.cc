// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>

#include <gtest/gtest.h>

#include <weft/tests/harness/mail.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::frame {
namespace {

using harness::bytes_of;

Bytes as_bytes(const std::vector<std::byte>& bytes) { return bytes; }

TEST(Frame, AcceptsWholeAndPartialPreambles) {
  const auto whole = preamble();
  for (std::size_t bytes = 0; bytes <= whole.size(); ++bytes) {
    EXPECT_FALSE(why_stranger(Bytes(whole).first(bytes))) << bytes;
  }
}

TEST(Frame, StrangersAreKnownByTheirFirstBytes) {
  for (const std::string_view text :
       {"GET / HTTP/1.1\r\n", "G", "WEFX", "weft", "\x16\x03\x01\x02", "SSH-2.0-"}) {
    EXPECT_TRUE(why_stranger(bytes_of(text))) << text;
  }
  const auto why = why_stranger(bytes_of("GET / HTTP/1.1"));
  ASSERT_TRUE(why);
  EXPECT_NE(why->find("GET /"), std::string::npos) << *why;
}

TEST(Frame, OtherVersionsAndFlagsAreRefused) {
  auto other = preamble();
  other[4] = std::byte{2};
  ASSERT_TRUE(why_stranger(other));
  EXPECT_NE(why_stranger(other)->find("version 2"), std::string::npos);
  auto flagged = preamble();
  flagged[7] = std::byte{1};
  EXPECT_TRUE(why_stranger(flagged));
}

TEST(Frame, FrontIsLittleEndianAndRoundTrips) {
  std::vector<std::byte> memory(300);
  const std::vector<Slice> payloads{{memory.data(), 300, {}}, {nullptr, 0, {}}};
  std::vector<std::byte> front;
  encode_front(5, payloads, front);
  const unsigned char expected[] = {5, 0, 0, 0, 2, 0, 0, 0, 0x2c, 1, 0, 0,
                                    0, 0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0};
  ASSERT_EQ(front.size(), sizeof expected);
  EXPECT_EQ(std::memcmp(front.data(), expected, sizeof expected), 0);
  const Head head = decode_head(front);
  EXPECT_EQ(head.header_bytes, 5u);
  EXPECT_EQ(head.payloads, 2u);
  EXPECT_EQ(head.front_bytes(), 8u + 16u + 5u);
  std::vector<std::uint64_t> sizes;
  EXPECT_EQ(decode_sizes(as_bytes(front).subspan(kHeadBytes), {}, sizes), 300u);
  EXPECT_EQ(sizes, (std::vector<std::uint64_t>{300, 0}));
}

TEST(Frame, HeadsAboveTheLimitsAreRefused) {
  Capabilities limits;
  limits.max_header = 100;
  limits.max_payloads = 10;
  EXPECT_FALSE(why_refused({100, 10}, limits));
  EXPECT_TRUE(why_refused({101, 0}, limits));
  EXPECT_TRUE(why_refused({0, 11}, limits));
  EXPECT_TRUE(why_refused({0xffffffff, 0}, limits));
  EXPECT_TRUE(why_refused({0, 0xfffffffe}, limits));
  EXPECT_FALSE(why_refused({kMaxGoodbye, kGoodbyePayloads}, limits));
  EXPECT_TRUE(why_refused({kMaxGoodbye + 1, kGoodbyePayloads}, limits));
}

TEST(Frame, ExcessiveTotalSizesAreRefused) {
  Capabilities limits;
  limits.max_message = 1000;
  std::vector<std::byte> table(16);
  std::vector<std::uint64_t> sizes;
  const auto set = [&](std::uint64_t first, std::uint64_t second) {
    std::memcpy(&table[0], &first, 8);  // the tests run on little-endian machines
    std::memcpy(&table[8], &second, 8);
    return decode_sizes(table, limits, sizes);
  };
  EXPECT_EQ(set(400, 600), 1000u);
  EXPECT_FALSE(set(400, 601));
  EXPECT_FALSE(set(1001, 0));
  EXPECT_FALSE(set(~std::uint64_t{0}, 1));
  EXPECT_FALSE(set(std::uint64_t{1} << 63, std::uint64_t{1} << 63));
}

TEST(Frame, GoodbyeReasonHasBoundedLength) {
  const auto goodbye = encode_goodbye("tired");
  const Head head = decode_head(goodbye);
  EXPECT_TRUE(head.is_goodbye());
  EXPECT_FALSE(why_refused(head, {}));
  EXPECT_EQ(head.front_bytes(), goodbye.size());
  EXPECT_EQ(std::memcmp(&goodbye[kHeadBytes], "tired", 5), 0);
  EXPECT_EQ(encode_goodbye(std::string(10'000, 'x')).size(), kHeadBytes + kMaxGoodbye);
  EXPECT_EQ(encode_goodbye("").size(), kHeadBytes);
}

TEST(Frame, TooLargeMessageNamesTheLimit) {
  Capabilities limits;
  limits.max_header = 10;
  limits.max_payloads = 2;
  limits.max_message = 100;
  EXPECT_FALSE(why_too_large(10, 2, 100, limits));
  for (const auto& why :
       {why_too_large(11, 0, 0, limits), why_too_large(0, 3, 0, limits),
        why_too_large(0, 1, 101, limits), why_too_large(0, 1, std::nullopt, limits)}) {
    ASSERT_TRUE(why);
    EXPECT_NE(why->find("max_"), std::string::npos)
        << "the reason does not name the limit: " << *why;
  }
  const Slice huge{nullptr, ~std::size_t{0}, {}};
  EXPECT_FALSE(total_of(std::array{huge, huge}));
  EXPECT_EQ(total_of({}), 0u);
}

}  // namespace
}  // namespace weft::transport::frame
