// SPDX-License-Identifier: Apache-2.0
// Drives the target without libFuzzer: with seeds of whole connections, cut and changed at random,
// the same ones in every run.
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <weft/transport/byte_stream.h>
#include <weft/transport/stream/frame.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

namespace weft::transport {

std::pair<std::size_t, bool> fuzz_frames(ByteStream::Bytes input);

namespace {

using Input = std::vector<std::byte>;

void append(Input& to, frame::Bytes bytes) { to.insert(to.end(), bytes.begin(), bytes.end()); }
// The input's first byte does not belong to the connection.
void pad(Input& to, std::size_t unit) {
  to.resize(to.size() + frame::padding(to.size() - 1, unit));
}

// The bytes of a connection with messages within the target's limits, and a goodbye at its end. The
// first byte is the piece size.
Input lane(unsigned messages, std::uint8_t pieces) {
  const std::size_t unit = pieces % 2 == 0 ? 1 : 64;
  Input input{std::byte{pieces}};
  append(input, frame::preamble());
  std::vector<std::byte> memory(64, std::byte{7});
  for (unsigned i = 0; i < messages; ++i) {
    std::vector<Slice> payloads;
    for (unsigned k = 0; k < i % 5; ++k)
      payloads.push_back({memory.data(), (i * 13 + k * 7) % memory.size(), {}});
    std::vector<std::byte> front;
    frame::encode_front(i % 50, payloads, front);
    pad(input, unit);
    append(input, front);
    append(input, frame::Bytes(memory).first(i % 50));
    pad(input, frame::payload_unit(unit));
    for (const Slice& payload : payloads) append(input, frame::Bytes(memory).first(payload.bytes));
  }
  pad(input, unit);
  append(input, frame::encode_goodbye("done"));
  return input;
}

TEST(FrameFuzz, ShowsAllMessagesInAnyPieces) {
  for (const std::uint8_t pieces : {0, 1, 2, 5, 20, 255}) {
    const auto [messages, has_ended] = fuzz_frames(lane(60, pieces));
    EXPECT_EQ(messages, 60u) << int{pieces};
    EXPECT_TRUE(has_ended);
  }
}

TEST(FrameFuzz, RandomInputNeverBreaksTheInbox) {
  std::mt19937 random(20240229);
  const auto upto = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit)(random);
  };
  constexpr int kRounds = 60'000;
  for (int round = 0; round < kRounds; ++round) {
    Input input = lane(static_cast<unsigned>(upto(12)), static_cast<std::uint8_t>(upto(255)));
    for (std::size_t changes = upto(4); changes > 0; --changes) {
      const std::size_t at = upto(input.size() - 1);
      switch (upto(4)) {
        case 0: input[at] = static_cast<std::byte>(upto(255)); break;
        case 1: input[at] ^= std::byte{0x80}; break;
        case 2: input.resize(at + 1); break;
        case 3:
          input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), upto(20),
                       static_cast<std::byte>(upto(255)));
          break;
        default: input.erase(input.begin() + static_cast<std::ptrdiff_t>(at)); break;
      }
      if (input.empty()) input.resize(1);
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  }
  for (int round = 0; round < kRounds / 10; ++round) {
    Input noise(upto(300));
    for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
    if (noise.size() > 9 && round % 2 == 0) std::ranges::copy(frame::preamble(), noise.begin() + 1);
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(noise.data()), noise.size());
  }
}

TEST(FrameFuzz, EveryPrefixEndsTheConnection) {
  for (const std::uint8_t pieces : {254, 255}) {
    const Input whole = lane(8, pieces);
    for (std::size_t bytes = 1; bytes < whole.size(); ++bytes) {
      const auto [messages, has_ended] = fuzz_frames(ByteStream::Bytes(whole).first(bytes));
      EXPECT_TRUE(has_ended) << bytes;
      EXPECT_LE(messages, 8u);
    }
  }
}

}  // namespace
}  // namespace weft::transport
