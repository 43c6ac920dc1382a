// SPDX-License-Identifier: Apache-2.0
// Unmatched messages between two ranks, planted in handmade dumps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/profiling/tools/made_dumps.h>

namespace weft::tools {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Analysis, NamesRanksWaitingForEachOther) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", 1, 1)};
  views[1].records = {message("receive", 2, 1)};
  views[2].records = {message("receive", 0, 1)};
  const auto findings = of(analyze(dumps), What::CycleOfWaits);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_THAT(findings[0].text, HasSubstr("rank 0 for rank 1 in recv #1 from rank 1"));
}

TEST(Analysis, NamesWhatTheSilentSenderDoes) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", 1, 1)};
  views[1].records = {message("receive", 2, 1), message("send", 2, 1, "done")};
  auto findings = of(analyze(dumps), What::StuckMessage);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_THAT(findings[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr(
          "rank 0 waits for 9.0 s in recv #1 from rank 1 of float32 [4] in group 'default', which "
          "rank 1 has "
          "not sent; it is in recv #1 from rank 2 of float32 [4] in group 'default' for 9.0 s"));
  EXPECT_THAT(findings[1].text, HasSubstr("which rank 2 has not sent; it has done nothing at all"));
  // A peer that computes.
  views[1].records = {collective(1, kSecond, 3 * kSecond)};
  findings = of(analyze(dumps), What::StuckMessage);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("it is in no operation: its last, collective #1, all_reduce of float32 [4], "
                "ended 7.0 s before its dump"));
  // Of several messages from one rank only the first is reported: the others follow it.
  views[0].records.push_back(message("receive", 1, 2));
  EXPECT_EQ(of(analyze(dumps), What::StuckMessage).size(), 1u);
}

TEST(Analysis, NamesAnUnreceivedSend) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("send", 1, 1, "done"), message("send", 1, 2)};
  views[1].records = {message("receive", 0, 1, "done")};
  auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, What::StuckMessage);
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("rank 0 waits for 9.0 s in send #2 to rank 1 of float32 [4] in group 'default', "
                "which rank 1 has not begun to receive; it is in no operation"));
  // The receive has another tag.
  views[1].records.push_back(message("receive", 0, 1));
  views[1].records.back().tag = 7;
  findings = of(analyze(dumps), What::StuckMessage);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_THAT(findings[1].text, HasSubstr("recv #1 from rank 0 with tag 7"));
}

TEST(Analysis, NamesAnAwaitedRankWithoutDump) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views.erase(1);
  views[0].records = {message("receive", 1, 1)};
  views[2].records = {message("send", 1, 1)};
  const auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, What::MissingRank);
  EXPECT_THAT(findings[0].ranks, ElementsAre(1));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("rank 1 is missing: there is no dump of it, and rank 0 waits for 9.0 s in recv "
                "#1 from rank 1 of float32 [4] in group 'default'"));
}

TEST(Analysis, FailedMessageSaysItsPeerLeft) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", 1, 1, "failed")};
  views[0].records[0].blame = "PeerLost";
  views[0].records[0].error = "rank 1 has left group 'default'";
  EXPECT_THAT(
      of(analyze(dumps), What::StuckMessage).at(0).text,
      HasSubstr(
          "rank 0 waited for 1.0 s in recv #1 from rank 1 of float32 [4] in group 'default', which "
          "rank 1 has "
          "not sent; it has done nothing at all (PeerLost: rank 1 has left group 'default')"));
  views[0].records[0].blame = "Timeout";
  views[1].records = {message("send", 0, 1)};
  views[1].records[0].begun = kStart + 5 * kSecond;
  EXPECT_THAT(of(analyze(dumps), What::StuckMessage).at(0).text,
              HasSubstr("which rank 1 came to only 3.0 s after that"));
  // A mistake of the caller is not a wait.
  views[0].records[0].blame = "Caller";
  views[1].records[0].begun = kStart + 9'900'000'000;
  EXPECT_TRUE(of(analyze(dumps), What::StuckMessage).empty());
}

TEST(Analysis, MessageIsStuckSinceItsLaterEnd) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", 1, 1)};
  views[1].records = {message("send", 0, 1)};
  views[1].records[0].begun = kStart + 10 * kSecond - 5'000'000;
  EXPECT_TRUE(analyze(dumps).empty());
  views[1].records[0].begun = kStart + 4 * kSecond;
  auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u) << "reported once, by the receiver";
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("which rank 1 has come to as well: it is in send #1 to rank 0 of float32 [4] for "
                "6.0 s"));
  views[1].records[0] = message("send", 0, 1, "done");
  EXPECT_THAT(of(analyze(dumps), What::StuckMessage).at(0).text,
              HasSubstr("which rank 1 has sent, 8.0 s before its dump"));
  // It was sent so long ago that the recorder has evicted it.
  views[1].records[0].sequence = 5;
  EXPECT_THAT(of(analyze(dumps), What::StuckMessage).at(0).text,
              HasSubstr("which rank 1 has sent, and later ones as well"));
}

TEST(Analysis, AnySourceReceiveCanBeStuck) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", -1, 0)};
  views[2].records = {message("send", 1, 1, "done")};
  auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, ElementsAre(0));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("rank 0 waits for 9.0 s in recv from any rank of float32 [4] in group 'default', "
                "which no rank has sent"));
  // The dump of rank 1 was taken before.
  dumps.dumps[1].time = kStart + kSecond;
  EXPECT_TRUE(analyze(dumps).empty());
  views.erase(1);
  EXPECT_THAT(of(analyze(dumps), What::StuckMessage).at(0).text,
              HasSubstr("of those that left a dump (rank 1 did not)"));
  views[2].records = {message("send", 0, 1)};
  findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].text, HasSubstr("which rank 2 has come to as well"));
}

TEST(Analysis, NamesMismatchedMessageEnds) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("send", 1, 1, "done")};
  views[1].records = {message("receive", 0, 1, "done")};
  EXPECT_TRUE(analyze(dumps).empty());
  views[1].records[0].bytes = 32;
  views[1].records[0].shape = {8};
  auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, What::Mismatch);
  EXPECT_THAT(findings[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(findings[0].text, HasSubstr("in message #1 from rank 0 to rank 1 in group 'default' "
                                          "rank 0 sends float32 [4], 16 bytes, and rank "
                                          "1 receives float32 [8], 32 bytes"));
  views[1].records[0] = message("receive", 0, 1, "done");
  views[1].records[0].dtype = "int32";
  EXPECT_EQ(of(analyze(dumps), What::Mismatch).size(), 1u);
}

TEST(Analysis, EvictedSendIsNotReportedUnsent) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", 1, 1)};
  views[1].records = {message("receive", 0, 1)};
  dumps.dumps[1].knows_since = kStart + 2 * kSecond;
  const auto findings = analyze(dumps);
  EXPECT_THAT(
      of(findings, What::StuckMessage).at(1).text,
      HasSubstr(
          "and it is not known whether rank 1 has sent it: its recorder has forgotten that time"));
  EXPECT_TRUE(of(findings, What::CycleOfWaits).empty());
  views[1].records.clear();
  views[0].records = {message("send", 1, 1)};
  EXPECT_THAT(of(analyze(dumps), What::StuckMessage).at(0).text,
              HasSubstr("it is not known whether rank 1 has received it"));
  views[0].records = {message("receive", -1, 0)};
  EXPECT_THAT(
      of(analyze(dumps), What::StuckMessage).at(0).text,
      HasSubstr(
          "which no rank is known to have sent; the recorder of rank 1 has forgotten that time"));
}

TEST(Analysis, MessageUnderWayIsNotACycle) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {message("receive", 1, 1)};
  views[1].records = {message("send", 0, 1), message("receive", 0, 1)};
  EXPECT_TRUE(of(analyze(dumps), What::CycleOfWaits).empty());
}

}  // namespace
}  // namespace weft::tools
