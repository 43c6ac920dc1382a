// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <weft/engine/membership/answers.h>

namespace weft::group {
namespace {

constexpr int kRanks = 10'000;

std::vector<Frame> frames_in(const std::string& bytes) {
  FrameReader reader(kRanks);
  reader.append(bytes);
  std::vector<Frame> frames;
  for (Frame frame; reader.next(frame).value();) frames.push_back(frame);
  return frames;
}

Frame answer(int rank, std::uint64_t leaver, const std::string& group = "g") {
  return {FrameType::Completed, rank, leaver, group, ""};
}

TEST(Answers, ToOneLeaverLeaveAsOneFrame) {
  Answers answers;
  answers.add(answer(3, 1));
  answers.add(answer(5, 2));
  answers.add(answer(4, 1));
  Frame merged = answer(7, 1);
  merged.text = "8 9 ";
  answers.add(merged);
  answers.add(answer(3, 1, "another"));
  const auto frames = frames_in(answers.take());
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(frames[0].group, "another");
  EXPECT_EQ(completers(frames[0]), std::vector<int>{3});
  EXPECT_EQ(frames[1].number, 1u);
  EXPECT_EQ(completers(frames[1]), (std::vector<int>{3, 4, 7, 8, 9}));
  EXPECT_EQ(frames[2].number, 2u);
  EXPECT_EQ(completers(frames[2]), std::vector<int>{5});
  EXPECT_EQ(answers.take(), "") << "each answer leaves once";
}

TEST(Answers, OfManyRanksFitIntoFrames) {
  Answers answers;
  for (int rank = 0; rank < kRanks; ++rank) answers.add(answer(rank, 1));
  std::vector<int> ranks;
  const auto frames = frames_in(answers.take());
  for (const Frame& frame : frames) {
    const auto more = completers(frame);
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  EXPECT_EQ(frames.size(), 3u);
  std::vector<int> all(kRanks);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(ranks, all);
}

TEST(Answers, OfRanksThatTheJobLacksAreRefused) {
  const auto is_refused = [](const std::string& text) {
    Frame frame = answer(1, 2);
    frame.text = text;
    FrameReader reader(4);
    reader.append(encode(frame));
    return !reader.next(frame).ok();
  };
  EXPECT_FALSE(is_refused("2 3 "));
  EXPECT_TRUE(is_refused("2 4 "));
  EXPECT_TRUE(is_refused("2000000000 "));
  EXPECT_FALSE(is_refused("18446744073709551615 ")) << "the list ends there";
  EXPECT_FALSE(is_refused("x"));
}

}  // namespace
}  // namespace weft::group
