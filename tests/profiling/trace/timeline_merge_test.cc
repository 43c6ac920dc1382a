// SPDX-License-Identifier: Apache-2.0
// Which process an event belongs to, how lost events are handled, and which rank merges.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>

#include <weft/profiling/trace/lane.h>
#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/timeline_part.h>
#include <weft/profiling/trace/trace.h>
#include <weft/profiling/trace/transports.h>
#include <weft/tests/profiling/trace/timeline_of_children.h>

namespace weft::trace {
namespace {

void all_reduce(const Member& me, std::uint64_t sequence) {
  Operation::begin(me, Kind::Collective, {.name = "all_reduce", .sequence = sequence}).end();
}

// A program that calls rpc::init with a server as agent 0, and then init_process_group in the
// trainers only.
TEST_F(Timeline, ProcessesAreDrawnByJobRank) {
  constinit static Name step{Layer::Engine, "forward"};
  const auto serve = [] {
    Operation::begin(Member::join({"agent", "server", 0, {}}), Kind::Served,
                     {.name = "f", .sequence = 1, .peer = 1})
        .end();
  };
  run(0, 3, serve);
  for (int trainer = 0; trainer < 2; ++trainer) {
    run(trainer + 1, 3, [trainer] {
      const Member agent =
          Member::join({"agent", "trainer" + std::to_string(trainer), trainer + 1, {}});
      Operation::begin(agent, Kind::Call, {.name = "f", .sequence = 1, .peer = 0}).end();
      const Range range(step, {.rank = trainer});
      all_reduce(member(trainer, 2), 1);
    });
  }
  const Json json = read();
  std::multiset<std::pair<int, int>> places;  // process, rank in the group
  for (const Json& span : events(json, "X")) {
    if (span.at("cat") == "collective") places.emplace(span.at("pid"), span.at("args").at("rank"));
  }
  EXPECT_EQ(places, (std::multiset<std::pair<int, int>>{{1, 0}, {2, 1}}));
  std::multiset<int> ranges;
  for (const Json& range : events(json, "B")) ranges.insert(range.at("pid").get<int>());
  EXPECT_EQ(ranges, (std::multiset<int>{1, 2}));
}

// As after a loss: the same processes, one fewer.
TEST_F(Timeline, GroupsOfOneNameAreToldApart) {
  for (int rank = 0; rank < 3; ++rank) {
    run(rank, 3, [rank] {
      all_reduce(member(rank, 3), 1);
      if (rank < 2) all_reduce(member(rank, 2), 1);
    });
  }
  const Json json = read();
  std::map<int, int> spans_of;  // by generation
  for (const Json& span : events(json, "X")) ++spans_of[span.at("args").value("generation", 0)];
  EXPECT_EQ(spans_of, (std::map<int, int>{{0, 3}, {1, 2}}));
  EXPECT_EQ(events(json, "s").size(), 3u)
      << "two ranks waited for the last of three, and one for the last of two";
}

TEST_F(Timeline, OperationsTellTheTransportsOfTheirGroup) {
  run(0, 1, [] {
    const Member in = member(0, 2);
    record_transports(in, "shm to rank 1");
    all_reduce(in, 1);
    all_reduce(member(0, 3), 1);
  });
  std::multiset<std::string> told;
  for (const Json& span : events(read(), "X")) told.insert(span.at("args").value("transports", ""));
  EXPECT_EQ(told, (std::multiset<std::string>{"", "shm to rank 1"}));
}

TEST_F(Timeline, OpenSpansEndWhereEventsAreLost) {
  timeline::Lane lane(1, "busy");
  const auto event = [](timeline::Event::What what, std::int64_t time, std::uint64_t ticket = 0) {
    timeline::Event made;
    made.what = what;
    made.time = time;
    made.text = "it";
    made.ticket = ticket;
    made.member = member(0, 1);
    return made;
  };
  using What = timeline::Event::What;
  timeline::Part part(timeline::folder_of_parts(file_), {kJob, 0, 1, {}});
  part.add_thread(lane);
  std::uint64_t lost = 0;
  const auto add = [&](timeline::Event made) { lost += lane.add(std::move(made)) ? 0 : 1; };
  const auto take = [&] { lane.take([&](const timeline::Event& one) { part.add(lane, one); }); };
  add(event(What::Push, 1'000));
  add(event(What::Begin, 2'000, 1));
  while (lost == 0) add(event(What::Mark, 3'000));
  add(event(What::Pop, 4'000));
  add(event(What::End, 4'000, 1));
  take();
  add(event(What::Push, 50'000));
  add(event(What::Pop, 60'000));
  add(event(What::Begin, 70'000, 2));
  add(event(What::End, 80'000, 2));
  take();
  EXPECT_EQ(lost, 3u);
  part.add_end(lost);
  part.flush();
  EXPECT_TRUE(timeline::merge(file_).complete);
  const Json json = read();
  std::vector<double> ends;
  for (const Json& end : events(json, "E")) ends.push_back(end.at("ts"));
  EXPECT_EQ(ends, (std::vector<double>{2, 59})) << "in microseconds since the first event";
  std::map<std::string, double> lasted;
  for (const Json& span : events(json, "X")) lasted[span.at("args").at("state")] = span.at("dur");
  EXPECT_EQ(lasted, (std::map<std::string, double>{{"done", 10}, {"unfinished", 1}}));
}

TEST_F(Timeline, ForkedHelperIsNotWaitedFor) {
  const std::string whose = folder_ + "/helper";
  run(0, 1, [&] {
    all_reduce(member(0, 1), 1);
    const pid_t helper = ::fork();
    if (helper == 0) {
      for (;;) ::pause();
    }
    std::ofstream(whose) << helper;
  });
  pid_t helper = 0;
  std::ifstream(whose) >> helper;
  ASSERT_GT(helper, 0);
  EXPECT_TRUE(std::filesystem::exists(file_)) << "the timeline was not merged";
  EXPECT_EQ(::kill(helper, SIGKILL), 0);
}

TEST_F(Timeline, ConcurrentMergesTakeTurns) {
  for (int rank = 0; rank < 2; ++rank) {
    timeline::Part part(timeline::folder_of_parts(file_), {kJob, rank, 2, {}});
    for (std::uint64_t i = 0; i < 200; ++i)
      part.add({0, 1, {"pack", Layer::Kernels, 64, rank}, 1, 2, 0, 0});
    part.add_end(0);
  }
  const auto merge_often = [&] {
    const pid_t child = ::fork();
    if (child != 0) return child;
    for (int i = 0; i < 50; ++i) {
      try {
        timeline::merge(file_);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ::_exit(1);
      }
      if (events(read(), "X").size() != 400) ::_exit(2);
    }
    ::_exit(0);
  };
  for (const pid_t child : {merge_often(), merge_often()}) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace
}  // namespace weft::trace
