// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/base/log.h>
#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/timeline_part.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/tests/profiling/trace/timeline_of_children.h>

namespace weft::trace {
namespace {

constinit Name outer{Layer::Engine, "outer"};
constinit Name inner{Layer::Kernels, "inner"};

TEST_F(Timeline, IsOffUntilAJobIsJoined) {
  EXPECT_FALSE(timeline::on());
  { const Range range(outer); }
  run(0, 1, [] {
    EXPECT_TRUE(timeline::on());
    const Range range(outer);
  });
  EXPECT_EQ(events(read(), "B").size(), 1u);
}

TEST_F(Timeline, RangesNestWithLayerAndBytes) {
  run(0, 1, [] {
    const Range first(outer);
    const Range second(inner, {.bytes = 64});
    mark(inner);
  });
  const Json json = read();
  const auto begins = events(json, "B");
  ASSERT_EQ(begins.size(), 2u);
  EXPECT_EQ(begins[0].at("name"), "outer");
  EXPECT_EQ(begins[1].at("cat"), "kernels");
  EXPECT_EQ(begins[1].at("args").at("bytes"), 64);
  EXPECT_EQ(events(json, "E").size(), 2u);
  EXPECT_EQ(events(json, "i").size(), 1u);
}

TEST_F(Timeline, MergesRanksWithArrowsForMessages) {
  run(0, 2, [] {
    const Member me = member(0, 2);
    for (std::uint64_t i = 1; i <= 3; ++i)
      Operation::begin(me, Kind::Send, {.name = "send", .sequence = i, .peer = 1, .bytes = 8})
          .end();
  });
  EXPECT_TRUE(std::filesystem::exists(timeline::folder_of_parts(file_)))
      << "rank 1 has not joined yet";
  run(1, 2, [] {
    const Member me = member(1, 2);
    for (std::uint64_t i = 1; i <= 3; ++i)
      Operation::begin(me, Kind::Receive, {.name = "recv", .sequence = i, .peer = 0, .bytes = 8})
          .end();
  });
  EXPECT_FALSE(std::filesystem::exists(timeline::folder_of_parts(file_)))
      << "all ranks have ended in order";
  const Json json = read();
  const auto from = events(json, "s");
  const auto to = events(json, "f");
  ASSERT_EQ(from.size(), 3u);
  ASSERT_EQ(to.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(from[i].at("id"), to[i].at("id"));
    EXPECT_EQ(from[i].at("pid"), 0);
    EXPECT_EQ(to[i].at("pid"), 1);
  }
}

TEST_F(Timeline, ThreadRanksEndWithTheirProcess) {
  run(0, 2, [] {
    for (const int rank : {0, 1})
      Operation::begin(member(rank, 2), Kind::Collective, {.name = "barrier", .sequence = 1}).end();
  });
  const Json ranks = read().at("otherData").at("ranks");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].at("pid"), ranks[1].at("pid"));
  EXPECT_TRUE(ranks[1].at("ended_in_order").get<bool>());
  EXPECT_FALSE(std::filesystem::exists(timeline::folder_of_parts(file_)));
}

TEST_F(Timeline, ShowsTheRootOfACollective) {
  run(0, 1, [] {
    Operation::begin(member(0, 1), Kind::Collective,
                     {.name = "broadcast", .sequence = 1, .peer = 0})
        .end();
  });
  const auto spans = events(read(), "X");
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].at("args").at("root"), 0);
  EXPECT_FALSE(spans[0].at("args").contains("peer"));
}

TEST_F(Timeline, DrawsCollectiveAndCallArrows) {
  run(0, 2, [] {
    Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
    Operation::begin(Member::join({"agent", "worker0", 0, {}}), Kind::Call,
                     {.name = "f", .sequence = 5, .peer = 1})
        .end();
  });
  run(1, 2, [] {
    Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
    Operation::begin(Member::join({"agent", "worker1", 1, {}}), Kind::Served,
                     {.name = "f", .sequence = 5, .peer = 0})
        .end();
  });
  std::multiset<std::string> names;
  for (const Json& arrow : events(read(), "s")) names.insert(arrow.at("name"));
  EXPECT_EQ(names, (std::multiset<std::string>{"call", "collective", "reply"}));
}

TEST_F(Timeline, OverlappingOperationsGetOwnRows) {
  run(0, 1, [] {
    const Member me = member(0, 1);
    Operation first = Operation::begin(me, Kind::Collective, {.name = "all_reduce", .sequence = 1});
    Operation second =
        Operation::begin(me, Kind::Collective, {.name = "all_reduce", .sequence = 2});
    first.end();
    second.fail(Error(Blame::PeerLost, "gone"));
    Operation::begin(me, Kind::Collective, {.name = "all_reduce", .sequence = 3}).end();
  });
  std::map<int, Json> spans;
  for (const Json& span : events(read(), "X")) spans[span.at("args").at("sequence")] = span;
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_NE(spans[1].at("tid"), spans[2].at("tid"));
  EXPECT_EQ(spans[1].at("tid"), spans[3].at("tid"));
  EXPECT_EQ(spans[2].at("args").at("state"), "failed");
  EXPECT_EQ(spans[2].at("args").at("error"), "gone");
}

TEST_F(Timeline, DrawsArrowsFromRangesToTheirWork) {
  run(0, 1, [] {
    Arrow arrow;
    {
      const Range gradient(outer);
      arrow = Arrow::leave();
    }
    Operation reduced;
    {
      const Range bucket(inner);
      arrow.arrive();
      reduced =
          Operation::begin(member(0, 1), Kind::Collective, {.name = "all_reduce", .sequence = 1});
    }
    std::thread([&] {
      const Range function(outer);
      reduced.runs_here();
    }).join();
    reduced.end();
    arrow.arrive();  // in no range: drawn nevertheless, as a moment of the thread
  });
  const Json json = read();
  std::map<std::string, std::vector<std::pair<Json, Json>>> arrows;  // by name, both ends
  for (const Json& from : events(json, "s")) {
    for (const Json& to : events(json, "f")) {
      if (from.at("id") == to.at("id")) arrows[from.at("name")].emplace_back(from, to);
    }
  }
  const auto begins = events(json, "B");
  const auto span = events(json, "X").at(0);
  ASSERT_EQ(begins.size(), 3u);
  ASSERT_EQ(arrows["starts"].size(), 2u);
  const auto& [gradient, bucket] = arrows["starts"][0];
  EXPECT_GE(gradient.at("ts"), begins[0].at("ts"));
  EXPECT_LE(gradient.at("ts"), events(json, "E").at(0).at("ts"));
  EXPECT_GE(bucket.at("ts"), begins[1].at("ts"));
  ASSERT_EQ(arrows["issues"].size(), 1u);
  EXPECT_EQ(arrows["issues"][0].first.at("tid"), begins[1].at("tid"));
  EXPECT_EQ(arrows["issues"][0].second.at("tid"), span.at("tid"));
  ASSERT_EQ(arrows["runs"].size(), 1u);
  EXPECT_EQ(arrows["runs"][0].first.at("tid"), span.at("tid"));
  EXPECT_EQ(arrows["runs"][0].second.at("tid"), begins[2].at("tid"));
}

TEST_F(Timeline, DrawsArrowsForGradientMessages) {
  constexpr int kPasses = 2;  // over a retained graph
  run(0, 2, [] {
    const Member me = Member::join({"agent", "worker0", 0, {}});
    for (int pass = 1; pass <= kPasses; ++pass)
      Operation::begin(me, Kind::Gradient,
                       {.name = "send gradient", .sequence = 8, .peer = 1, .tag = pass})
          .end();
  });
  run(1, 2, [] {
    const Member me = Member::join({"agent", "worker1", 1, {}});
    for (int pass = 1; pass <= kPasses; ++pass)
      Operation::begin(me, Kind::Gradient,
                       {.name = "gradient", .sequence = 8, .peer = 0, .tag = pass})
          .end();
  });
  const Json json = read();
  ASSERT_EQ(events(json, "s").size(), 2u);
  for (const Json& arrow : events(json, "f")) {
    EXPECT_EQ(arrow.at("name"), "gradient");
    EXPECT_EQ(arrow.at("pid"), 1);
  }
}

// Each agent of a process starts its counts of calls and messages at 1.
TEST_F(Timeline, DrawsNoArrowsToEarlierAgents) {
  const auto call = [](const char* name, Kind kind, std::uint64_t sequence, int rank) {
    const Member me = Member::join({"agent", "worker" + std::to_string(rank), rank, {}});
    Operation::begin(me, kind, {.name = name, .sequence = sequence, .peer = 1 - rank}).end();
  };
  const auto first = [&](int rank) {
    call("first", rank == 0 ? Kind::Call : Kind::Served, 5, rank);
    call(rank == 0 ? "send gradient" : "gradient", Kind::Gradient, 8, rank);
  };
  int came[2];
  int went[2];
  ASSERT_EQ(::pipe(came), 0);
  ASSERT_EQ(::pipe(went), 0);
  const pid_t other = ::fork();
  char byte = 0;
  if (other == 0) {
    timeline::join(file_, {kJob, 1, 2, {}});
    [[maybe_unused]] const auto count = ::read(went[0], &byte, 1);
    first(1);
    [[maybe_unused]] const auto written = ::write(came[1], "x", 1);
    timeline::finish();
    ::_exit(0);
  }
  run(0, 2, [&] {
    first(0);
    ASSERT_EQ(::write(went[1], "x", 1), 1);
    ASSERT_EQ(::read(came[0], &byte, 1), 1);
    call("second", Kind::Call, 5, 0);  // lost
    call("send gradient", Kind::Gradient, 8, 0);
  });
  int status = 0;
  ::waitpid(other, &status, 0);
  EXPECT_EQ(status, 0);
  const Json json = read();
  double second = 0;
  for (const Json& span : events(json, "X")) {
    if (span.at("name") == "second") second = span.at("ts");
  }
  EXPECT_GT(second, 0);
  const auto arrows = events(json, "s");
  EXPECT_EQ(arrows.size(), 3u) << "one each for call, reply and gradient";
  for (const Json& arrow : arrows) EXPECT_LT(arrow.at("ts"), second) << arrow;
}

// A device with two finished spans.
class TwoSpans final : public timeline::Source {
 public:
  explicit TwoSpans(std::uint64_t arrow) : arrow_(arrow) {}
  void collect(const std::function<void(const timeline::DeviceSpan&)>& take) noexcept override {
    if (std::exchange(arrow_, 0) == 0) return;
    const std::int64_t time = now();
    take({0, 77, {"pack", Layer::Kernels, 64, 0}, time, time + 5000, 900, 1});
    take({0, 78, {"all_reduce", Layer::Transport, 0, 0}, time + 1000, time + 3000, 900, 0});
  }

 private:
  std::uint64_t arrow_;
};

TEST_F(Timeline, ShowsDeviceSpansByStream) {
  run(0, 1, [] {
    const Range range(outer);
    const Arrow arrow = Arrow::leave();
    EXPECT_EQ(arrow.id(), 1u);
    timeline::ask(std::make_shared<TwoSpans>(arrow.id()));
  });
  const Json json = read();
  const auto spans = events(json, "X");
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].at("name"), "pack");
  EXPECT_EQ(spans[0].at("cat"), "device");
  EXPECT_DOUBLE_EQ(spans[0].at("dur"), 5.0);
  EXPECT_EQ(spans[0].at("args").at("clock_error_ns"), 900);
  EXPECT_EQ(spans[0].at("args").at("bytes"), 64);
  EXPECT_NE(spans[0].at("tid"), spans[1].at("tid"));
  std::set<std::string> rows;
  for (const Json& meta : events(json, "M")) {
    if (meta.at("name") == "thread_name") rows.insert(meta.at("args").at("name"));
  }
  EXPECT_TRUE(rows.contains("cuda:0 stream 1"));
  EXPECT_TRUE(rows.contains("cuda:0 stream 2"));
  ASSERT_EQ(events(json, "s").size(), 1u);
  EXPECT_EQ(events(json, "s")[0].at("name"), "launches");
  EXPECT_EQ(events(json, "f")[0].at("tid"), spans[0].at("tid"));
}

TEST_F(Timeline, SecondFileIsRefusedNamingTheFirst) {
  run(0, 1, [this] {
    timeline::join(file_, {kJob, 0, 1, {}});
    timeline::require(file_);
    try {
      timeline::join(folder_ + "/other.json", {kJob, 0, 1, {}});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("'" + folder_ + "/other.json'"), std::string::npos)
          << error.text();
      EXPECT_NE(error.text().find("in '" + file_ + "' already"), std::string::npos) << error.text();
    }
  });
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/other.json"));
}

TEST_F(Timeline, RelativePathIsResolvedAtOnce) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::filesystem::current_path(folder_);
    timeline::join("run.json", {kJob, 0, 1, {}});
    std::filesystem::current_path("/");
    timeline::require("run.json");  // another group names the same file
    timeline::finish();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::exists(file_));
  EXPECT_FALSE(std::filesystem::exists(timeline::folder_of_parts(file_)));
}

// A part may have been written on another machine.
TEST_F(Timeline, PartsEndAtTheirFirstWrongLine) {
  const std::string header = R"({"weft":"timeline part 1","job":")" + std::string(kJob) +
                             R"(","rank":1,"ranks":2,"host":"h","machine":"m","pid":1,)"
                             R"("offset":9223372036854775807,"error":0})";
  const std::vector<std::string> wrong{R"(["O",1,1,5,"call",99,"f",1,0,0,0,"",[]])",
                                       R"(["F"])",
                                       "[]",
                                       "7",
                                       "{",
                                       R"(["D",0])",
                                       R"(["B","one",5,"n","l",0,0])",
                                       R"({"party":1,"kind":"group"})"};
  std::filesystem::create_directories(timeline::folder_of_parts(file_));
  for (const std::string& line : wrong) {
    SCOPED_TRACE(line);
    std::ofstream(timeline::folder_of_parts(file_) + "/" + kJob + ".1.9")
        << header << "\n"
        << R"(["M",1,9223372036854775807,"before","engine",0,1])"
        << "\n"
        << line << "\n"
        << R"(["M",1,6,"after","engine",0,1])"
        << "\n";
    timeline::merge(file_);
    const auto marks = events(read(), "i");
    ASSERT_EQ(marks.size(), 1u);
    EXPECT_EQ(marks[0].at("name"), "before");
  }
}

TEST_F(Timeline, SaysWhichRanksHaveNoRanges) {
  run(0, 2, [] {});
  std::ofstream(timeline::folder_of_parts(file_) + "/" + kJob + ".1.9")
      << R"({"weft":"timeline part 1","job":")" + std::string(kJob) +
             R"(","rank":1,"ranks":2,"host":"h","machine":"m","pid":1,"ranges":false,)"
             R"("offset":0,"error":0})"
             "\n";
  timeline::merge(file_);
  const Json ranks = read().at("otherData").at("ranks");
  EXPECT_TRUE(ranks[0].at("ranges").get<bool>());
  EXPECT_FALSE(ranks[1].at("ranges").get<bool>());
}

TEST_F(Timeline, PartsOfTwoJobsAreRefused) {
  run(0, 2, [] {});
  std::filesystem::remove(file_);
  const std::string other = timeline::folder_of_parts(file_) + "/fedcba9876543210.1.9";
  std::ofstream(other)
      << R"({"weft":"timeline part 1","job":"fedcba9876543210","rank":1,"ranks":2,"host":"h",)"
         R"("machine":"m","pid":1,"offset":0,"error":0})"
         "\n";
  try {
    timeline::merge(file_);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("1 of '" + std::string(kJob) + "'"), std::string::npos)
        << error.text();
    EXPECT_NE(error.text().find("1 of 'fedcba9876543210'"), std::string::npos) << error.text();
  }
  EXPECT_FALSE(std::filesystem::exists(file_));
  std::filesystem::remove(other);
  timeline::merge(file_);
  EXPECT_TRUE(std::filesystem::exists(file_));
}

TEST_F(Timeline, PartEndedByItselfIsNotMerged) {
  run(0, 1, [] {
    { const Range range(outer); }
    const std::string own = timeline::own_part();
    EXPECT_EQ(timeline::end_part(), own);
    EXPECT_FALSE(timeline::on());
    EXPECT_EQ(timeline::end_part(), "");
    EXPECT_TRUE(std::filesystem::exists(own));
  });
  EXPECT_FALSE(std::filesystem::exists(file_));
  EXPECT_TRUE(timeline::merge(file_).complete);
}

TEST_F(Timeline, KeepsEventsOfAKilledRank) {
  const pid_t child = ::fork();
  if (child == 0) {
    timeline::join(file_, {kJob, 1, 2, {}});
    static_cast<void>(
        Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}));
    for (;;) ::pause();
  }
  const auto has_written = [&] {
    std::error_code ignored;
    for (const auto& entry :
         std::filesystem::directory_iterator(timeline::folder_of_parts(file_), ignored)) {
      std::ostringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      if (text.str().find("[\"O\"") != std::string::npos) return true;
    }
    return false;
  };
  while (!has_written()) std::this_thread::yield();  // ctest's time limit ends it
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  run(0, 2, [] {
    Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
  });
  const Json json = read();
  std::map<int, std::string> states;
  for (const Json& span : events(json, "X")) states[span.at("pid")] = span.at("args").at("state");
  EXPECT_EQ(states, (std::map<int, std::string>{{0, "done"}, {1, "unfinished"}}));
  EXPECT_FALSE(json.at("otherData").at("ranks")[1].at("ended_in_order").get<bool>());
}

TEST_F(Timeline, LeftOversOfAnotherJobAreNotMerged) {
  std::filesystem::create_directories(timeline::folder_of_parts(file_));
  std::ofstream(timeline::folder_of_parts(file_) + "/fedcba9876543210.7.1")
      << R"({"weft":"timeline part 1","job":"fedcba9876543210","rank":7,"ranks":8,"host":"h",)"
         R"("machine":"m","pid":1,"offset":0,"error":0})"
         "\n";
  run(0, 1, [] { const Range range(outer); });
  const Json json = read();
  for (const Json& rank : json.at("otherData").at("ranks")) EXPECT_NE(rank.at("rank"), 7);
}

TEST_F(Timeline, LeftOversAreRemovedUnlessInUse) {
  const std::string folder = timeline::folder_of_parts(file_);
  const std::string part = folder + "/fedcba9876543210.7.1";
  // A shared lock is held by a process that checks for writers, an exclusive one by a writer.
  for (const int held : {LOCK_SH, LOCK_EX}) {
    std::filesystem::create_directories(folder);
    std::ofstream(part) << "{}\n";
    const Descriptor holder(::open(part.c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(::flock(holder.get(), held), 0);
    run(0, 1, [&] { EXPECT_EQ(std::filesystem::exists(part), held == LOCK_EX); });
  }
}

TEST_F(Timeline, WarnsIfALargerJobIsJoinedLater) {
  const std::string other = "fedcba9876543210";
  const auto warnings_of = [&](const std::vector<timeline::ProcessInJob>& later) {
    std::vector<std::string> warnings;
    const log::Capture capture(
        [&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
    for (const timeline::ProcessInJob& place : later) timeline::join(file_, place);
    return warnings;
  };
  run(0, 2, [&] {
    EXPECT_TRUE(
        warnings_of({{kJob, 1, 3, {}}, {other, 0, 2, {}}, {other, 0, 1, {}}, {other, 0, 0, {}}})
            .empty());
    const auto warnings = warnings_of({{other, 0, 3, {}}, {other, 0, 4, {}}});
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_NE(warnings[0].find("that of the job with 2 ranks"), std::string::npos) << warnings[0];
    EXPECT_NE(warnings[0].find("join the job of all processes first"), std::string::npos)
        << warnings[0];
  });
  run(0, 0, [&] {
    EXPECT_TRUE(warnings_of({{other, 0, 2, {}}}).empty())
        << "all processes may have been in the first job";
  });
}

TEST_F(Timeline, OutOfThreadsLeavesNoPart) {
  EXPECT_EXIT(
      {
        const harness::NoMoreThreads no_more;
        if (harness::can_make_threads()) {
          std::fputs(
              "ulimit -u",
              stderr);  // this system, or this sanitizer, makes threads with stacks of any size
          ::_exit(0);
        }
        try {
          timeline::join(file_, {kJob, 0, 1, {}});
        } catch (const Error& error) {
          std::fputs(error.what(), stderr);
          ::_exit(error.blame() == Blame::Busy && !timeline::on() ? 0 : 1);
        }
        ::_exit(2);
      },
      testing::ExitedWithCode(0), "ulimit -u");
  EXPECT_THROW(timeline::merge(file_), Error) << "a part was left";
}

TEST_F(Timeline, MergingNoPartsIsAnError) { EXPECT_THROW(timeline::merge(file_), Error); }

TEST_F(Timeline, FoldersAndDevicesAreRefusedFirst) {
  for (const std::string& place : {folder_, folder_ + "/none/", std::string("/dev/null")}) {
    try {
      timeline::require(place);
      ADD_FAILURE() << "no error for " << place;
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("'" + place + "', which is"), std::string::npos) << error.text();
    }
    EXPECT_THROW(timeline::join(place, {kJob, 0, 1, {}}), Error);
    EXPECT_FALSE(std::filesystem::exists(timeline::folder_of_parts(place)));
  }
  timeline::require(file_);
}

TEST_F(Timeline, FailedMergeKeepsOnlyTheParts) {
  run(0, 2, [] {});  // rank 1 does not join, so the part stays
  std::filesystem::remove(file_);
  std::filesystem::create_directory(file_);
  try {
    timeline::merge(file_);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(error.text().find("cannot be put at '" + file_ + "'"), std::string::npos)
        << error.text();
  }
  EXPECT_FALSE(std::filesystem::exists(file_ + ".new"));
  EXPECT_FALSE(std::filesystem::is_empty(timeline::folder_of_parts(file_)));
}

TEST_F(Timeline, PartialOutputIsRemoved) {
  run(0, 2, [] {});
  std::filesystem::remove(file_);
  std::filesystem::create_symlink("/dev/full", file_ + ".new");
  EXPECT_THROW(timeline::merge(file_), Error);
  EXPECT_FALSE(std::filesystem::is_symlink(file_ + ".new"));
  EXPECT_FALSE(std::filesystem::exists(file_));
}

TEST_F(Timeline, UnwritablePartIsOneWarning) {
  std::filesystem::create_symlink("/dev/full",
                                  folder_ + "/" + kJob + ".0." + std::to_string(::getpid()));
  std::vector<std::string> warnings;
  const log::Capture capture([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  {
    timeline::Part part(folder_, {kJob, 0, 1, {}});
    for (int i = 0; i < 10; ++i) {
      part.add_end(0);
      part.flush();
    }
  }
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("is not whole: writing it: No space left on device"),
            std::string::npos)
      << warnings[0];
}

TEST_F(Timeline, FullPartCountsLostEvents) {
  constexpr std::uint64_t kBytes = 4096;
  constexpr std::uint64_t kEvents = 100;
  std::vector<std::string> warnings;
  const log::Capture capture([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  std::string path;
  {
    timeline::Part part(timeline::folder_of_parts(file_), {kJob, 0, 1, {}}, kBytes);
    path = part.path();
    for (std::uint64_t i = 0; i < kEvents; ++i)
      part.add({0, 1, {"pack", Layer::Kernels, 64, 0}, 1, 2, 0, 0});
    part.add_end(7);
  }
  EXPECT_LE(std::filesystem::file_size(path), kBytes);
  EXPECT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(timeline::merge(file_).complete) << "the part ended in order nevertheless";
  const Json json = read();
  const auto kept = events(json, "X").size();
  EXPECT_GT(kept, 10u);
  EXPECT_LT(kept, kEvents);
  EXPECT_EQ(json.at("otherData").at("ranks")[0].at("events_lost"), kEvents - kept + 7);
}

TEST_F(Timeline, ManyThreadsLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int kEach = 3000;
  run(0, 1, [] {
    const Member me = member(0, 1);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([me] {
        for (int k = 0; k < kEach; ++k) Operation::begin(me, Kind::Call, {.name = "f"}).end();
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const auto spans = events(read(), "X");
  EXPECT_EQ(spans.size(), std::size_t{kThreads} * kEach);
  for (const Json& span : spans) ASSERT_EQ(span.at("args").at("state"), "done");
}

}  // namespace
}  // namespace weft::trace
