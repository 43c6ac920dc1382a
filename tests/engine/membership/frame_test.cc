// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include <weft/engine/membership/frame.h>

namespace weft::group {
namespace {

std::span<const char> bytes_of(const std::string& text) { return {text.data(), text.size()}; }

TEST(Frame, SurvivesBytewiseDelivery) {
  const std::string bytes = encode({FrameType::Abort, 3, 9, "a group", "a reason"}) +
                            encode({FrameType::Goodbye, 1, 0, "", ""});
  FrameReader reader(4);
  std::vector<Frame> frames;
  for (const char byte : bytes) {
    reader.append({&byte, 1});
    Frame frame;
    const auto complete = reader.next(frame);
    ASSERT_TRUE(complete.ok());
    if (complete.value()) frames.push_back(frame);
  }
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].type, FrameType::Abort);
  EXPECT_EQ(frames[0].rank, 3);
  EXPECT_EQ(frames[0].number, 9u);
  EXPECT_EQ(frames[0].group, "a group");
  EXPECT_EQ(frames[0].text, "a reason");
  EXPECT_EQ(frames[1].type, FrameType::Goodbye);
}

TEST(Frame, LongTextIsCut) {
  FrameReader reader(1);
  reader.append(
      bytes_of(encode({FrameType::Abort, 0, 0, "g", std::string(2 * kMaxFrameText, 'x')})));
  Frame frame;
  ASSERT_TRUE(reader.next(frame).value());
  EXPECT_EQ(frame.text.size(), kMaxFrameText);
}

TEST(FrameReader, RefusesMalformedBytes) {
  const std::string good = encode({FrameType::Hello, 1, 0, "g", "t"});
  const auto refused = [](std::string bytes) {
    FrameReader reader(2);
    reader.append(bytes_of(bytes));
    Frame frame;
    return !reader.next(frame).ok();
  };
  EXPECT_FALSE(refused(good));
  const auto with = [&](std::size_t place, auto value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + place, &value, sizeof value);
    return bytes;
  };
  EXPECT_TRUE(refused(std::string(kFrameHead, '\0')));
  EXPECT_TRUE(refused("GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"));
  EXPECT_TRUE(refused(with(0, 'x')));              // magic
  EXPECT_TRUE(refused(with(4, std::uint8_t(0))));  // type
  EXPECT_TRUE(refused(with(4, std::uint8_t(17))));
  EXPECT_TRUE(refused(with(8, std::int32_t(2))));  // rank
  EXPECT_TRUE(refused(with(8, std::int32_t(-1))));
  EXPECT_TRUE(refused(
      with(12, static_cast<std::uint32_t>(kMaxFrameText + 1))));  // sizes, before anything is kept
  EXPECT_TRUE(refused(with(16, std::uint32_t(0xffffffff))));
}

// Otherwise a stranger could make this process keep 16 MiB for each of its connections.
TEST(FrameReader, TakesNoLongFrameBeforeTheHello) {
  const std::string request = encode({FrameType::StoreRequest, 1, 0, "", std::string(100, 'x')});
  FrameReader reader(2, /*has_greeted=*/false);
  Frame frame;
  const std::string hello = encode({FrameType::Hello, 1, 0, "", "token"});
  reader.append(bytes_of(hello));
  ASSERT_TRUE(reader.next(frame).value());
  FrameReader other = reader;
  reader.append(bytes_of(request.substr(0, kFrameHead)));
  EXPECT_FALSE(reader.next(frame).ok());
  other.greeted();
  other.append(bytes_of(request));
  EXPECT_TRUE(other.next(frame).value());
}

TEST(Reason, KeepsBlameRanksAndText) {
  const Error reason = Error(Blame::Timeout, "7 days are over").with_ranks({0, 2});
  const auto decoded = decode_reason(encode_reason(reason), 3);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->blame(), Blame::Timeout);
  EXPECT_EQ(decoded->ranks(), (std::vector<int>{0, 2}));
  EXPECT_EQ(decoded->text(), "7 days are over");
}

TEST(Reason, OfUnknownBlameIsRemote) {
  EXPECT_EQ(decode_reason("99999999999 0 text", 2)->blame(), Blame::Remote);
}

TEST(Reason, IsRefusedWithoutValidRanks) {
  for (const char* text : {"", "3", "3 ", "3 1", "3 1 ", "3 1 2 rank", "3 4 0 1 0 1 x", "3 -1 x",
                           "3 18446744073709551615 0 x", "3 2 0 ", "x 0 text"})
    EXPECT_FALSE(decode_reason(text, 2)) << text;
}

TEST(Reason, ChangedBytesNameNoRankOutsideTheGroup) {
  const std::string good = encode_reason(Error(Blame::PeerLost, "gone").with_ranks({0, 1, 2}));
  std::mt19937 random(5);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = good.substr(0, random() % (good.size() + 1));
    for (int i = 0; i < 3 && !bytes.empty(); ++i)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    const auto decoded = decode_reason(bytes, 3);
    if (!decoded) continue;
    for (const int rank : decoded->ranks()) ASSERT_TRUE(rank >= 0 && rank < 3) << bytes;
  }
}

}  // namespace
}  // namespace weft::group
