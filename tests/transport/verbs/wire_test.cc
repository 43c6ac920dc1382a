// SPDX-License-Identifier: Apache-2.0
// The hellos and notes of a peer, over TCP and on the queue pair, and of a stranger.
#include <random>

#include <gtest/gtest.h>

#include <weft/transport/verbs/wire.h>

namespace weft::transport::verbs {
namespace {

Hello some_hello() {
  Hello hello;
  hello.fabric = Fabric::InfiniBand;
  for (std::size_t i = 0; i < hello.gid.size(); ++i)
    hello.gid[i] = static_cast<std::uint8_t>(7 * i);
  hello.lid = 0x1234;
  hello.queue_pair = 0xabcdef;
  hello.packet = 0x123456;
  hello.mtu_bytes = 4096;
  hello.receives = 256;
  hello.ring_bytes = 256 << 10;
  hello.ring_key = 0xfeedface;
  hello.ring_address = 0x7f0123456000;
  hello.max_write_bytes = 8 << 20;
  return hello;
}

TEST(VerbsHello, RoundTrips) {
  const auto decoded = decode_hello(encode(some_hello()));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded.value(), some_hello());
}

TEST(VerbsHello, OtherLengthsAndVersionsAreRefused) {
  const auto bytes = encode(some_hello());
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode_hello(Bytes(bytes).first(length)).ok());
  std::vector<std::byte> longer(bytes.begin(), bytes.end());
  longer.push_back({});
  EXPECT_FALSE(decode_hello(longer).ok());
  auto newer = bytes;
  newer[4] = std::byte{9};
  const auto refused = decode_hello(newer);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().blame(), Blame::Protocol);
  EXPECT_NE(refused.error().text().find("version 9"), std::string::npos) << refused.error().text();
}

TEST(VerbsHello, ImpossibleNumbersAreRefused) {
  const auto is_refused = [](const std::function<void(Hello&)>& change) {
    Hello hello = some_hello();
    change(hello);
    return !decode_hello(encode(hello)).ok();
  };
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.fabric = static_cast<Fabric>(3); }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.queue_pair = 1 << 24; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.packet = 1 << 24; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.mtu_bytes = 0; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.mtu_bytes = 1500; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.ring_bytes = 0; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.ring_bytes = 0x80000000; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.receives = 0; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.receives = 0xffffffff; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.max_write_bytes = 0; }));
  EXPECT_TRUE(is_refused([](Hello& hello) { hello.ring_address = ~std::uint64_t{0}; }));
  EXPECT_FALSE(is_refused([](Hello&) {}));
}

TEST(VerbsNote, RoundTrips) {
  for (const auto kind :
       {Note::Kind::Room, Note::Kind::Waits, Note::Kind::Place, Note::Kind::Finished}) {
    const Note note{kind, 0xfffffff0, 0x1234, std::uint64_t{1} << 40, 77, 0x7f00dead0000};
    EXPECT_EQ(decode_note(encode(note)), note);
  }
}

TEST(VerbsNote, OtherKindsAndLengthsAreRefused) {
  auto bytes = encode(Note{});
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode_note(Bytes(bytes).first(length)));
  for (const unsigned kind : {0u, 5u, 255u}) {
    bytes[0] = static_cast<std::byte>(kind);
    EXPECT_FALSE(decode_note(bytes)) << kind;
  }
}

// A hello that is decoded from random bytes is within every bound that the connection relies on.
TEST(VerbsHello, RandomBytesAreRefusedOrInBounds) {
  std::mt19937 random(4);
  int taken = 0;
  for (int round = 0; round < 100'000; ++round) {
    auto bytes = encode(some_hello());
    for (std::uint32_t changes = random() % 4; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    const auto hello = decode_hello(bytes);
    if (!hello) continue;
    ++taken;
    const Hello& told = hello.value();
    ASSERT_TRUE(told.ring_bytes >= 4096 && told.ring_bytes <= 1u << 30 &&
                (told.ring_bytes & (told.ring_bytes - 1)) == 0);
    ASSERT_TRUE(told.receives >= 16 && told.mtu_bytes >= 256 && told.mtu_bytes <= 4096 &&
                told.max_write_bytes >= 4096);
  }
  EXPECT_GT(taken, 10'000);  // otherwise the seeds are not hellos
}

}  // namespace
}  // namespace weft::transport::verbs
