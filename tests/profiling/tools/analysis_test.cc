// SPDX-License-Identifier: Apache-2.0
// Each fault, planted in handmade dumps. tests/engine/instruments/planted_faults_test.cc does the
// same with real ranks.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/profiling/tools/duration.h>
#include <weft/profiling/tools/remarks.h>
#include <weft/tests/profiling/tools/made_dumps.h>

namespace weft::tools {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace std::chrono_literals;

TEST(Analysis, FindsNothingInARunningJob) {
  Dumps dumps = job(3);
  for (auto& [rank, view] : dumps.groups[0].views) {
    for (std::uint64_t i = 1; i <= 10; ++i) {
      view.records.push_back(collective(
          i, static_cast<std::int64_t>(i) * 1000 + (static_cast<std::int64_t>(i) + rank) % 3,
          static_cast<std::int64_t>(i) * 1000 + 500));
    }
  }
  EXPECT_TRUE(analyze(dumps).empty());
}

TEST(Analysis, NamesLateRankAndItsCollective) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  for (int rank = 0; rank < 3; ++rank) views[rank].records.push_back(collective(1, 0, kSecond));
  views[0].records.push_back(collective(2, 2 * kSecond, 0));
  views[1].records.push_back(collective(2, 3 * kSecond, 0));
  const auto findings = of(analyze(dumps), What::LateRank);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, ElementsAre(2));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("it has not come to collective #2, all_reduce of float32 [4] in group 'default', "
                "where ranks 0, 1 wait for 8.0 s"));
  EXPECT_THAT(findings[0].text, HasSubstr("its last was collective #1"));
}

TEST(Analysis, SaysWhatTheLateRankDoesInstead) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 0, 0)};
  views[1].records = {message("receive", 0, 1)};
  const auto findings = of(analyze(dumps), What::LateRank);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("it is in recv #1 from rank 0 of float32 [4] in group 'default' for 9.0 s"));
}

TEST(Analysis, SaysInWhichRangeTheProgramOfTheLateRankIs) {
  Dumps dumps = job(2);
  dumps.groups[0].views[0].records = {collective(1, 0, 0)};
  dumps.dumps[1].pid = 4711;
  dumps.dumps[1].ranges = {{"step", kStart + kSecond}, {"load data", kStart + 2 * kSecond}};
  const auto findings = of(analyze(dumps), What::LateRank);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].text, HasSubstr("; it is process 4711, in the range 'step' for 9.0 s, "
                                          "'load data' for 8.0 s"));
}

Record meeting(const std::string& name, std::uint64_t number, const std::string& state = "open") {
  Record record = collective(number, kSecond, state == "open" ? 0 : 2 * kSecond, name);
  record.kind = "meeting";
  record.state = state;
  record.dtype.clear();
  if (state == "failed") record.blame = "Timeout";
  return record;
}

TEST(Analysis, NamesRanksMissingAtAMeeting) {
  for (const char* name : {"monitored_barrier", "new_group", "split", "Mesh"}) {
    Dumps dumps = job(3);
    auto& views = dumps.groups[0].views;
    // Each kind of operation has its own numbers.
    for (int rank = 0; rank < 3; ++rank)
      views[rank].records = {collective(1, 0, 1), collective(2, 0, 1)};
    views[0].records.push_back(meeting(name, 1));
    views[2].records.push_back(meeting(name, 1));
    const auto findings = analyze(dumps);
    ASSERT_EQ(findings.size(), 1u) << name;
    EXPECT_THAT(findings[0].ranks, ElementsAre(1));
    EXPECT_THAT(findings[0].text,
                HasSubstr(std::string("it has not come to ") + name +
                          " #1 in group 'default', where ranks 0, 2 wait for 9.0 s"));
    views[1].records.push_back(message("receive", 0, 1));
    EXPECT_EQ(of(analyze(dumps), What::CycleOfWaits).size(),
              std::string(name) == "new_group" ? 0u : 1u)
        << "a new group waits for its members only";
  }
}

TEST(Analysis, SkippingABarrierIsNotLateness) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {meeting("monitored_barrier", 1, "failed"),
                      meeting("monitored_barrier", 2, "done")};
  views[1].records = {meeting("monitored_barrier", 2, "done")};
  const auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, What::Failure);
  views[0].records.push_back(meeting("monitored_barrier", 3));
  EXPECT_THAT(of(analyze(dumps), What::LateRank).at(0).text,
              HasSubstr("it has not come to monitored_barrier #3"));
}

TEST(Analysis, RankThatTimedOutAlsoWaited) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 0, 5 * kSecond)};
  views[0].records[0].state = "failed";
  views[0].records[0].blame = "Timeout";
  EXPECT_THAT(of(analyze(dumps), What::LateRank).at(0).ranks, ElementsAre(1));
}

TEST(Analysis, NamesTheMissingRank) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views.erase(1);
  views[0].records = {collective(1, 0, 0)};
  views[2].records = {collective(1, 0, 0)};
  const auto findings = analyze(dumps);
  ASSERT_EQ(of(findings, What::MissingRank).size(), 1u);
  EXPECT_THAT(of(findings, What::MissingRank)[0].ranks, ElementsAre(1));
  EXPECT_TRUE(of(findings, What::LateRank).empty());
}

TEST(Analysis, NamesTheMismatchedCollective) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  for (int rank = 0; rank < 3; ++rank)
    views[rank].records = {collective(1, 0, 1), collective(2, 2, 0)};
  views[1].records[1].name = "broadcast";
  auto findings = of(analyze(dumps), What::Mismatch);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, ElementsAre(1));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("in collective #2 of group 'default' ranks 0, 2 call all_reduce of float32 [4], "
                "16 bytes, and rank 1 calls broadcast of float32 [4], 16 bytes"));
  views[1].records[1].name = "all_reduce";
  views[1].records[1].bytes = 20;
  EXPECT_THAT(of(analyze(dumps), What::Mismatch).at(0).ranks, ElementsAre(1));
  views[1].records[1].bytes = 16;
  views[1].records[1].dtype = "int32";
  EXPECT_THAT(of(analyze(dumps), What::Mismatch).at(0).ranks, ElementsAre(1));
}

TEST(Analysis, NamesDifferingRootsOpsAndShapes) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  const auto all_call = [&](const char* name, const char* reduction, int root) {
    for (int rank = 0; rank < 3; ++rank) {
      views[rank].records = {collective(1, 0, 0, name)};
      views[rank].records[0].reduction = reduction;
      views[rank].records[0].peer = root;
    }
  };
  all_call("broadcast", "", 0);
  views[1].records[0].peer = 1;
  auto findings = of(analyze(dumps), What::Mismatch);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, ElementsAre(1));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("ranks 0, 2 call broadcast (root 0) of float32 [4], 16 bytes, and rank 1 calls "
                "broadcast (root 1) of float32 [4], 16 bytes"));
  all_call("reduce", "Sum", 2);
  EXPECT_TRUE(of(analyze(dumps), What::Mismatch).empty());
  views[2].records[0].reduction = "Max";
  EXPECT_THAT(of(analyze(dumps), What::Mismatch).at(0).text,
              HasSubstr("ranks 0, 1 call reduce (Sum, root 2) of float32 [4], 16 bytes, and rank 2 "
                        "calls reduce (Max, root "
                        "2) of float32 [4], 16 bytes"));
  all_call("all_reduce", "Sum", -1);
  views[0].records[0].shape = {2, 2};
  EXPECT_THAT(of(analyze(dumps), What::Mismatch).at(0).text,
              HasSubstr("rank 0 calls all_reduce (Sum) of float32 [2, 2]"));
}

TEST(Analysis, HarmlessShapeHidesNoMismatch) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  for (int rank = 0; rank < 3; ++rank)
    views[rank].records = {collective(1, 0, 1), collective(2, 2, 0)};
  views[0].records[0].shape = {2, 2};
  views[1].records[1].name = "broadcast";
  const auto findings = of(analyze(dumps), What::Mismatch);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, ElementsAre(1));
  EXPECT_THAT(findings[0].text, HasSubstr("in collective #2 "));
}

TEST(Analysis, TwoDifferingRanksAreBothNamed) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 0, 0)};
  views[1].records = {collective(1, 0, 0, "broadcast")};
  EXPECT_THAT(of(analyze(dumps), What::Mismatch).at(0).ranks, ElementsAre(0, 1));
}

TEST(Analysis, UnequalAllToAllIsNoMismatch) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 0, 1, "all_to_all")};
  views[1].records = {collective(1, 0, 1, "all_to_all")};
  views[1].records[0].bytes = 400;
  EXPECT_TRUE(analyze(dumps).empty());
}

TEST(Analysis, RootWithAllPartsIsNoMismatch) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  for (const char* name : {"gather", "scatter"}) {
    views[0].records = {collective(1, 0, 1, name)};
    views[1].records = {collective(1, 0, 1, name)};
    views[1].records[0].bytes = 48;
    EXPECT_TRUE(analyze(dumps).empty()) << name;
    views[1].records[0].shape = {2};
    EXPECT_EQ(of(analyze(dumps), What::Mismatch).size(), 1u) << name;
  }
}

// In a reduce_scatter with parts of several sizes, ranks keep parts of different sizes.
TEST(Analysis, UnequalReduceScatterIsNoMismatch) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  for (const int rank : {0, 1}) views[rank].records = {collective(1, 0, 1, "reduce_scatter")};
  views[1].records[0].bytes = 80;
  EXPECT_TRUE(analyze(dumps).empty());
  views[1].records[0].reduction = "Max";
  EXPECT_EQ(of(analyze(dumps), What::Mismatch).size(), 1u);
}

TEST(Analysis, RankWithEvictedRecordsIsNotLate) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, kSecond, 0, "gather")};  // the root, which waits for rank 1
  views[2].records = {call("call", 0, 7, "done")};
  EXPECT_EQ(of(analyze(dumps), What::LateRank).size(), 2u);
  dumps.dumps[2].knows_since = kStart + 2 * kSecond;  // it may have sent its part before
  const auto late = of(analyze(dumps), What::LateRank);
  ASSERT_EQ(late.size(), 1u);
  EXPECT_THAT(late[0].ranks, ElementsAre(1));
  dumps.dumps[2].knows_since = kStart;
  EXPECT_EQ(of(analyze(dumps), What::LateRank).size(), 2u);
}

// The recorder keeps an open operation while it overwrites others, so this record does not show
// which operations followed it.
TEST(Analysis, LongOpenRecordDoesNotProveLateness) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(7, 2 * kSecond, 0)};
  views[1].records = {collective(5, kSecond, 9 * kSecond)};
  dumps.dumps[1].knows_since = kStart + 3 * kSecond;
  EXPECT_TRUE(of(analyze(dumps), What::LateRank).empty());
  dumps.dumps[1].knows_since = kStart + kSecond;
  EXPECT_THAT(of(analyze(dumps), What::LateRank).at(0).text,
              HasSubstr("its last was collective #5"));
  views[1].records.clear();
  EXPECT_THAT(of(analyze(dumps), What::LateRank).at(0).text,
              HasSubstr("its recorder shows none, as far back as it goes"));
}

TEST(Analysis, NamesACycleOfMixedOperations) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 0, 0)};
  views[1].records = {message("receive", 0, 1)};
  EXPECT_EQ(of(analyze(dumps), What::CycleOfWaits).size(), 1u);
}

TEST(Analysis, NamesACycleOfCalls) {
  Dumps dumps = job(3);
  for (int rank = 0; rank < 3; ++rank) {
    const int next = (rank + 1) % 3, before = (rank + 2) % 3;
    dumps.agents[rank].records = {call("call", next, 7, "open"), call("served", before, 7, "open")};
  }
  auto findings = of(analyze(dumps), What::CycleOfWaits);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].ranks, testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("rank 0 for rank 1 in the call of work::slowly on rank 1; rank 1 for rank 2"));
  dumps.agents[2].records = {call("served", 1, 7, "open")};
  EXPECT_TRUE(of(analyze(dumps), What::CycleOfWaits).empty());
}

TEST(Analysis, TellsTheFateOfUnansweredCalls) {
  Dumps dumps = job(3);
  dumps.agents[0].records = {call("call", 1, 7, "open"), call("call", 1, 8, "open"),
                             call("call", 2, 9, "open"), call("call", 1, 10, "done")};
  dumps.agents[1].records = {call("served", 0, 7, "open"), call("served", 0, 9, "open"),
                             call("served", 0, 8, "done")};
  const auto findings = of(analyze(dumps), What::NoReply);
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_THAT(findings[0].text, HasSubstr("rank 0 waits for 9.0 s for a reply to the call of "
                                          "work::slowly on rank 1: it has run there for 9.0 s"));
  EXPECT_THAT(findings[1].text, HasSubstr("it was answered there after 1.0 s"));
  EXPECT_THAT(findings[2].text, HasSubstr("on rank 2: it has never arrived there"));
}

TEST(Analysis, QueuedCallNamesWhatTheThreadsRun) {
  Dumps dumps = job(2);
  Record queued = call("served", 0, 7, "open"), running = call("served", 0, 6, "open");
  queued.runs = false;
  running.name = "work::hold";
  dumps.agents[0].records = {call("call", 1, 7, "open")};
  dumps.agents[1].records = {running, queued};
  EXPECT_THAT(
      of(analyze(dumps), What::NoReply).at(0).text,
      HasSubstr("it has not begun there: it waits for the value of an RRef, or for a thread "
                "(rpc::Options::worker_threads of that worker); that worker runs "
                "work::hold for 9.0 s"));
}

TEST(Analysis, EvictedCallIsNotReportedMissing) {
  Dumps dumps = job(2);
  dumps.agents[0].records = {call("call", 1, 7, "open")};
  dumps.dumps[1].knows_since = kStart + 2 * kSecond;
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text,
              HasSubstr("it is not known whether it has arrived there: the recorder of rank 1 has "
                        "forgotten that time"));
  dumps.dumps[1].knows_since = kStart + kSecond;
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text,
              HasSubstr("it has never arrived there"));
  dumps.dumps[1].host = "other";
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text, HasSubstr("has forgotten that time"));
}

// Each agent of a process counts its calls from 1.
TEST(Analysis, CallsOfAnEarlierAgentDoNotMatch) {
  Dumps dumps = job(2);
  Record early = call("served", 0, 7, "done");
  early.begun -= kSecond / 2;
  early.ended -= kSecond / 2;
  dumps.agents[0].records = {call("call", 1, 7, "open")};
  dumps.agents[1].records = {early};
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text,
              HasSubstr("it has never arrived there"));
  dumps.agents[1].records.push_back(call("served", 0, 7, "open"));
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text,
              HasSubstr("it has run there for 9.0 s"));
  // Nor does a call of a later agent count for it.
  Record later = call("call", 1, 7, "done");
  later.begun += kSecond;
  later.ended += kSecond;
  dumps.agents[0].records.push_back(later);
  dumps.agents[1].records = {call("served", 0, 7, "done")};
  dumps.agents[1].records[0].begun += 2 * kSecond;
  dumps.agents[1].records[0].ended += 2 * kSecond;
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text,
              HasSubstr("it has never arrived there"));
}

TEST(Analysis, ClocksMayDifferByASecond) {
  Dumps dumps = job(2);
  dumps.dumps[1].host = "other";
  dumps.agents[0].records = {call("call", 1, 7, "open")};
  dumps.agents[1].records = {call("served", 0, 7, "open")};
  dumps.agents[1].records[0].begun -= kSecond / 2;
  EXPECT_THAT(of(analyze(dumps), What::NoReply).at(0).text, HasSubstr("it has run there for"));
}

TEST(Analysis, NamesASlowRankInARunningJob) {
  Dumps dumps = job(3);
  for (auto& [rank, view] : dumps.groups[0].views) {
    for (std::uint64_t i = 1; i <= 20; ++i) {
      const auto start = static_cast<std::int64_t>(i) * kSecond;
      view.records.push_back(
          collective(i, start + (rank == 1 ? 50'000'000 : rank), start + 60'000'000));
    }
  }
  const auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, What::SlowRank);
  EXPECT_THAT(findings[0].ranks, ElementsAre(1));
  EXPECT_THAT(
      findings[0].text,
      HasSubstr("came last to 20 of the last 20 collectives of group 'default', 50.0 ms behind"));
}

TEST(Analysis, NamesTheFirstFailure) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 0, 4 * kSecond)};
  views[1].records = {collective(1, 0, 3 * kSecond)};
  for (int rank = 0; rank < 2; ++rank) {
    views[rank].records[0].state = "failed";
    views[rank].records[0].blame = "Device";
    views[rank].records[0].error = "ECC on rank " + std::to_string(rank);
  }
  EXPECT_THAT(of(analyze(dumps), What::Failure).at(0).text,
              HasSubstr("the first failure was on rank 1: collective #1, all_reduce of float32 "
                        "[4]: Device: ECC on rank 1"));
}

// In a running job every rank has some operation under way.
TEST(Analysis, RecentWorkIsARemarkNotAFinding) {
  Dumps dumps = job(3);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 10 * kSecond - 8'000'000, 0)};
  views[1].records = {message("receive", 2, 1)};
  views[1].records[0].begun = kStart + 10 * kSecond - 20'000'000;
  dumps.agents[2].records = {call("call", 0, 7, "open")};
  dumps.agents[2].records[0].begun = kStart + 10 * kSecond - 400'000;
  EXPECT_TRUE(analyze(dumps).empty());
  EXPECT_THAT(
      remarks(dumps, kOlderThan).running,
      ElementsAre(
          "rank 0 is in collective #1, all_reduce of float32 [4] in group 'default' for 8.0 ms",
          "rank 1 is in recv #1 from rank 2 of float32 [4] in group 'default' for 20.0 ms",
          "rank 2 is in the call of work::slowly on rank 0 for 0.4 ms"));
  const auto findings = analyze(dumps, 0ns);
  EXPECT_EQ(of(findings, What::LateRank).size(), 2u);
  EXPECT_EQ(of(findings, What::NoReply).size(), 1u);
  EXPECT_TRUE(of(analyze(dumps, 10ms), What::LateRank).empty());
}

TEST(Analysis, FailuresCountAtAnyAge) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 10 * kSecond - 8'000'000, 10 * kSecond)};
  views[0].records[0].state = "failed";
  views[0].records[0].blame = "Timeout";
  EXPECT_EQ(of(analyze(dumps), What::LateRank).size(), 1u);
}

TEST(Analysis, CollectiveIsStuckSinceItsLastRank) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, kSecond, 0)};
  views[1].records = {collective(1, 10 * kSecond - 5'000'000, 0)};
  EXPECT_TRUE(analyze(dumps).empty());
  views[1].records = {collective(1, 2 * kSecond, 0)};
  EXPECT_EQ(of(analyze(dumps), What::StuckCollective).size(), 1u);
}

TEST(Analysis, EarlyDumpDoesNotProveLateness) {
  Dumps dumps = job(2);
  auto& views = dumps.groups[0].views;
  views[0].records = {collective(1, 2 * kSecond, 0)};
  dumps.dumps[1].time = kStart + 2 * kSecond + 5'000'000;
  EXPECT_TRUE(analyze(dumps).empty());
  dumps.dumps[1].time = kStart + 4 * kSecond;
  EXPECT_EQ(of(analyze(dumps), What::LateRank).size(), 1u);
}

TEST(Analysis, ShuttingDownIsNotAWait) {
  Dumps dumps = job(2);
  dumps.agents[0].records = {call("call", 1, 7, "open"), call("served", 1, 1, "open")};
  dumps.agents[1].records = {call("served", 0, 7, "open"), call("call", 0, 1, "open")};
  for (const int rank : {0, 1})
    dumps.agents[rank].records[1].name = "weft::rpc::internal::join_shutdown";
  const auto findings = analyze(dumps);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].text, HasSubstr("for a reply to the call of work::slowly on rank 1"));
  EXPECT_THAT(remarks(dumps, kOlderThan).running,
              ElementsAre("rank 1 has called shutdown(), 9.0 s ago"));
}

TEST(Analysis, NamesMembersWithoutADump) {
  Dumps dumps = job(3);
  dumps.groups[0].views.erase(1);
  dumps.agents.erase(1);
  EXPECT_TRUE(analyze(dumps).empty());
  EXPECT_THAT(remarks(dumps, kOlderThan).without_dump, ElementsAre(1));
}

// A damaged dump may contain this.
TEST(Analysis, DuplicateNumbersDoNotCrash) {
  Dumps dumps = job(1);
  dumps.groups[0].views[0].records = {collective(1, 0, kSecond), collective(1, kSecond, 0)};
  EXPECT_TRUE(analyze(dumps).empty());
}

TEST(Duration, HasAUnit) {
  EXPECT_EQ(parse_duration("--older-than", "500ms"), 500ms);
  EXPECT_EQ(parse_duration("--older-than", "1s"), 1s);
  EXPECT_EQ(parse_duration("--older-than", "1.5min"), 90s);
  EXPECT_EQ(parse_duration("--older-than", "0"), 0s);
  for (const char* wrong : {"", "1", "s", "-1s", "1 h", "nan", "nans", "infs", "1e30s", "1ss"})
    EXPECT_THROW(parse_duration("--older-than", wrong), Error) << wrong;
}

TEST(Analysis, NonDumpsAreRefusedByName) {
  std::string folder = std::filesystem::temp_directory_path() / "weft-dumps-XXXXXX";
  ::mkdtemp(folder.data());
  const auto message_for = [&](const std::string& text) -> std::string {
    std::ofstream(folder + "/dump.json") << text;
    try {
      read_dumps({folder + "/dump.json"});
    } catch (const Error& error) {
      return error.text();
    }
    return "";
  };
  EXPECT_THAT(message_for("no json"), HasSubstr("dump.json' is not a dump of a flight recorder"));
  EXPECT_THAT(message_for("[]"), HasSubstr("is not a dump"));
  EXPECT_THAT(message_for(R"({"weft":"flight recorder 1"})"), HasSubstr("dump.json'"));
  EXPECT_THAT(
      message_for(R"({"weft":"flight recorder 1","host":"h","pid":1,"time":0,"wall_clock":0,)"
                  R"("reason":"","parties":[],"records":[{"party":9}]})"),
      "");
  EXPECT_THROW(read_dumps({folder + "/none.json"}), Error);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft::tools
