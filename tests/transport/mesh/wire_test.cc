// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {
namespace {

using testing::HasSubstr;

constexpr int kRanks = 4;

Header header_of(Type type) {
  Header header;
  header.type = type;
  header.call = {Kind::AllReduce, Dtype::Float32, ReduceOp::Max, 3, 12};
  header.sequence = 0x123456789abc;
  header.number = 77;
  header.blame = Blame::Caller;
  return header;
}

TEST(Wire, HeaderRoundTrips) {
  for (const Type type :
       {Type::Collective, Type::Eager, Type::Request, Type::Clear, Type::Payload, Type::Credit}) {
    const Header sent = header_of(type);
    const bool has_payload =
        type == Type::Collective || type == Type::Eager || type == Type::Payload;
    const std::uint64_t sizes[] = {12};
    const auto bytes = encode(sent);
    const auto message = decode(bytes, std::span(sizes, has_payload ? 1 : 0), kRanks);
    ASSERT_TRUE(message.ok()) << message.error().what();
    EXPECT_EQ(message.value().header.type, type);
    EXPECT_EQ(message.value().header.call, sent.call);
    EXPECT_EQ(message.value().header.sequence, sent.sequence);
    EXPECT_EQ(message.value().header.number, sent.number);
    EXPECT_EQ(message.value().payload, has_payload ? 12u : 0u);
  }
}

TEST(Wire, ReasonIsKeptOnOneLine) {
  auto bytes = encode_failure(Error(Blame::Caller, "out of\nluck"));
  const auto message = decode(bytes, {}, kRanks);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message.value().text, "out of luck");
  EXPECT_EQ(message.value().header.blame, Blame::Caller);
  EXPECT_TRUE(message.value().about.empty());
  bytes.resize(kHeaderBytes + kMaxText + 1);
  EXPECT_FALSE(decode(bytes, {}, kRanks).ok());
}

TEST(Wire, ReasonNamesItsRanks) {
  const auto whole = encode_failure(Error(Blame::PeerLost, "lost").with_ranks({3, 0}));
  const auto message = decode(whole, {}, kRanks);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message.value().about, (std::vector{0, 3}));
  EXPECT_EQ(message.value().text, "lost");
  EXPECT_FALSE(decode(whole, {}, 3).ok()) << "a group of three has no rank 3";
  EXPECT_FALSE(decode(Bytes(whole).first(kHeaderBytes + 5), {}, kRanks).ok());
  for (const std::uint32_t count : {3U, 0x40000001U, 0xffffffffU}) {
    auto wrong = header_of(Type::Failure);
    wrong.number = count;
    const auto fixed = encode(wrong);
    auto bytes = whole;
    std::copy(fixed.begin(), fixed.end(), bytes.begin());
    EXPECT_FALSE(decode(bytes, {}, kRanks).ok()) << count;
  }
  // Ranks beyond the limit are dropped, and a long text is cut.
  std::vector<int> many(2 * kMaxAbout);
  std::iota(many.begin(), many.end(), 0);
  const auto cut = decode(
      encode_failure(Error(Blame::PeerLost, std::string(9000, 'x')).with_ranks(many)), {}, 1 << 20);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut.value().about.size(), kMaxAbout);
  EXPECT_EQ(cut.value().text.size(), kMaxText);
}

TEST(Wire, EveryFieldIsChecked) {
  const auto refused = [](std::size_t byte, std::uint8_t value, const char* text,
                          Type type = Type::Collective) {
    auto bytes = encode(header_of(type));
    bytes[byte] = static_cast<std::byte>(value);
    const auto message = decode(bytes, {}, kRanks);
    ASSERT_FALSE(message.ok()) << text;
    EXPECT_THAT(message.error().text(), HasSubstr(text));
    EXPECT_EQ(message.error().blame(), Blame::Protocol);
  };
  refused(0, 0, "type 0");
  refused(0, 9, "type 9");
  refused(1, 9, "kind 9");
  refused(2, 17, "dtype 17");
  refused(3, 8, "operator 8");
  refused(4, kRanks, "root 4");
  refused(7, 0xff, "root -");
  refused(28, 9, "blame 9", Type::Failure);
  refused(24, 5, "step 5 of closing", Type::Closing);
  const auto whole = encode(header_of(Type::Collective));
  for (std::size_t bytes = 0; bytes < kHeaderBytes; ++bytes) {
    EXPECT_FALSE(decode(Bytes(whole).first(bytes), {}, kRanks).ok()) << bytes;
  }
  const std::uint64_t two[] = {1, 2};
  EXPECT_FALSE(decode(whole, two, kRanks).ok());
  const std::uint64_t other[] = {13};
  EXPECT_FALSE(decode(encode(header_of(Type::Eager)), other, kRanks).ok());
  EXPECT_FALSE(decode(encode(header_of(Type::Clear)), other, kRanks).ok());
}

TEST(Wire, OnlyAWellFormedHelloRoundTrips) {
  Hello hello;
  hello.token.fill(std::byte{0x5a});
  hello.rank = 2;
  hello.ranks = 3;
  hello.traffic = Traffic::Messages;
  hello.closed = 7;
  const auto bytes = encode(hello);
  const auto back = decode_hello(bytes);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back.value().token, hello.token);
  EXPECT_EQ(back.value().rank, 2u);
  EXPECT_EQ(back.value().ranks, 3u);
  EXPECT_EQ(back.value().traffic, Traffic::Messages);
  EXPECT_EQ(back.value().closed, 7u);
  for (const std::size_t byte : {0u, 4u, 6u, 7u, 8u}) {  // magic, version, traffic, answer, rank
    auto wrong = bytes;
    wrong[byte] = std::byte{0x71};
    EXPECT_FALSE(decode_hello(wrong).ok()) << byte;
  }
  EXPECT_FALSE(decode_hello(Bytes(bytes).first(31)).ok());
  EXPECT_FALSE(decode_hello({}).ok());
}

TEST(Wire, ModelAndStepNumbersWrapAround) {
  EXPECT_EQ(carried({}), Training());
  EXPECT_EQ(carried({255, 0xff'ffff}), (Training{255, 0xff'ffff}));
  EXPECT_EQ(carried({256, 0x100'0000}), (Training{1, 1}));
  for (const Training training : {Training{}, Training{1, 0}, Training{255, 0xff'ffff}}) {
    Header header;
    header.call.training = training;
    const auto bytes = encode(header);
    EXPECT_EQ(decode(bytes, {}, 2).value().header.call.training, training);
  }
}

TEST(Wire, CallsAreDescribed) {
  EXPECT_EQ(describe(Call{Kind::AllReduce, Dtype::Float32, ReduceOp::Sum, 0, 8}),
            "all_reduce of 2 elements of float32 with Sum");
  EXPECT_EQ(describe(Call{Kind::Broadcast, Dtype::Int64, ReduceOp::Sum, 2, 16}),
            "broadcast of 2 elements of int64 from rank 2");
  EXPECT_EQ(describe(Call{Kind::AllReduce, Dtype::Float32, ReduceOp::Sum, 0, 8, {2, 3}}),
            "all_reduce of 2 elements of float32 with Sum, of the gradients of step 3 of "
            "DistributedDataParallel 2");
  EXPECT_EQ(describe(Call{Kind::Broadcast, Dtype::Float32, ReduceOp::Sum, 0, 8, {2, 0}}),
            "broadcast of 2 elements of float32, of the buffers of DistributedDataParallel 2 from "
            "rank 0");
  EXPECT_EQ(describe(Call{}), "barrier");
}

}  // namespace
}  // namespace weft::transport::mesh
