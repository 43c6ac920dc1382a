#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/trace.h>

namespace weft::trace {
namespace {

using Json = nlohmann::json;

constinit Name outer{Layer::Engine, "outer"};
constinit Name inner{Layer::Kernels, "inner"};

constexpr const char* kJob = "0123456789abcdef";

class Timeline : public testing::Test {
 protected:
  Timeline() {
    std::string name = std::filesystem::temp_directory_path() / "weft-timeline-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    file_ = folder_ + "/run.json";
  }
  ~Timeline() override { std::filesystem::remove_all(folder_); }

  // Runs body as a rank, in a process of its own.
  void run(int rank, int ranks, const std::function<void()>& body, timeline::Clock clock = {}) {
    const pid_t child = ::fork();
    if (child == 0) {
      timeline::join(file_, {kJob, rank, ranks, clock});
      body();
      timeline::finish();
      ::_exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }

  Json read() const {
    std::ifstream stream(file_);
    return Json::parse(stream);
  }
  static std::vector<Json> events(const Json& json, const std::string& phase) {
    std::vector<Json> found;
    for (const Json& event : json.at("traceEvents")) {
      if (event.at("ph") == phase) found.push_back(event);
    }
    return found;
  }

  std::string folder_;
  std::string file_;
};

Member member(int rank, int ranks) {
  Party party{"group", "default", rank, {}};
  for (int i = 0; i < ranks; ++i) party.ranks.push_back(i);
  return Member::join(party);
}

TEST_F(Timeline, IsOffUntilAJobIsJoined) {
  EXPECT_FALSE(timeline::on());
  { const Range range(outer); }
  run(0, 1, [] {
    EXPECT_TRUE(timeline::on());
    const Range range(outer);
  });
  EXPECT_EQ(events(read(), "B").size(), 1u);
}

TEST_F(Timeline, RangesOfAThreadNestAndShowLayerAndBytes) {
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

TEST_F(Timeline, MergesAllRanksWithAnArrowFromEachSendToItsReceive) {
  run(0, 2, [] {
    const Member me = member(0, 2);
    for (std::uint64_t i = 1; i <= 3; ++i)
      Operation::begin(me, Kind::Send, {.name = "send", .sequence = i, .peer = 1, .bytes = 8}).end();
  });
  EXPECT_TRUE(std::filesystem::exists(timeline::folder_of_parts(file_))) << "rank 1 has not come yet";
  run(1, 2, [] {
    const Member me = member(1, 2);
    for (std::uint64_t i = 1; i <= 3; ++i)
      Operation::begin(me, Kind::Receive, {.name = "recv", .sequence = i, .peer = 0, .bytes = 8}).end();
  });
  EXPECT_FALSE(std::filesystem::exists(timeline::folder_of_parts(file_))) << "all have ended in good order";
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

TEST_F(Timeline, DrawsArrowsFromTheLastOfACollectiveAndForCalls) {
  run(0, 2, [] {
    Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
    Operation::begin(Member::join({"agent", "worker0", 0, {}}), Kind::Call, {.name = "f", .sequence = 5, .peer = 1}).end();
  });
  run(1, 2, [] {
    Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
    Operation::begin(Member::join({"agent", "worker1", 1, {}}), Kind::Served, {.name = "f", .sequence = 5, .peer = 0})
        .end();
  });
  std::multiset<std::string> names;
  for (const Json& arrow : events(read(), "s")) names.insert(arrow.at("name"));
  EXPECT_EQ(names, (std::multiset<std::string>{"call", "collective", "reply"}));
}

TEST_F(Timeline, OperationsThatOverlapGetRowsOfTheirOwn) {
  run(0, 1, [] {
    const Member me = member(0, 1);
    Operation first = Operation::begin(me, Kind::Collective, {.name = "all_reduce", .sequence = 1});
    Operation second = Operation::begin(me, Kind::Collective, {.name = "all_reduce", .sequence = 2});
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

TEST_F(Timeline, ClocksAreShiftedAndTheirErrorIsStated) {
  constexpr std::int64_t kHour = 3'600'000'000'000;
  run(0, 2, [] { Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end(); });
  run(1, 2, [] { Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end(); },
      {kHour, 1'500'000});
  const Json json = read();
  std::map<int, double> begins;
  for (const Json& span : events(json, "X")) begins[span.at("pid")] = span.at("ts");
  EXPECT_GE(begins[1] - begins[0], kHour / 1000.0);
  EXPECT_EQ(json.at("otherData").at("ranks")[1].at("clock_error_ns"), 1'500'000);
  std::set<std::string> names;
  for (const Json& meta : events(json, "M")) {
    if (meta.at("name") == "process_name") names.insert(meta.at("args").at("name").get<std::string>());
  }
  EXPECT_TRUE(std::any_of(names.begin(), names.end(), [](const auto& name) { return name.ends_with("clock ± 1500 µs"); }));
}

TEST_F(Timeline, KeepsWhatARankWroteBeforeItWasKilled) {
  const pid_t child = ::fork();
  if (child == 0) {
    timeline::join(file_, {kJob, 1, 2, {}});
    static_cast<void>(Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}));
    for (;;) ::pause();
  }
  const auto has_written = [&] {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(timeline::folder_of_parts(file_), ignored)) {
      std::ostringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      if (text.str().find("[\"O\"") != std::string::npos) return true;
    }
    return false;
  };
  while (!has_written()) std::this_thread::yield();  // ctest's time limit ends it
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  run(0, 2, [] { Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end(); });
  const Json json = read();
  std::map<int, std::string> states;
  for (const Json& span : events(json, "X")) states[span.at("pid")] = span.at("args").at("state");
  EXPECT_EQ(states, (std::map<int, std::string>{{0, "done"}, {1, "unfinished"}}));
  EXPECT_FALSE(json.at("otherData").at("ranks")[1].at("ended_in_order").get<bool>());
}

TEST_F(Timeline, LeftOversOfAnotherJobAreNotMerged) {
  std::filesystem::create_directories(timeline::folder_of_parts(file_));
  std::ofstream(timeline::folder_of_parts(file_) + "/fedcba9876543210.7.1")
      << R"({"weft":"timeline part 1","job":"fedcba9876543210","rank":7,"ranks":8,"host":"h","machine":"m","pid":1,"offset":0,"error":0})"
         "\n";
  run(0, 1, [] { const Range range(outer); });
  const Json json = read();
  for (const Json& rank : json.at("otherData").at("ranks")) EXPECT_NE(rank.at("rank"), 7);
}

TEST_F(Timeline, WithoutPartsThereIsNothingToMerge) { EXPECT_THROW(timeline::merge(file_), Error); }

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
