// SPDX-License-Identifier: Apache-2.0
// Tests WEFT_TIMELINE with real ranks.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <nlohmann/json.hpp>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <weft/autograd.h>
#include <weft/group.h>
#include <weft/parallel.h>
#include <weft/profiling/tools/summary.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/trace.h>
#include <weft/rpc.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::Processes;

constinit trace::Name ours{trace::Layer::User, "ours"};

int twice(int value) { return 2 * value; }
// Calls twice() on the next worker.
int twice_there(int value) {
  rpc::Agent& agent = rpc::this_agent();
  return agent.sync<&twice>(agent.self().rank + 1, value);
}

class TimelineOfRanks : public testing::Test {
 protected:
  TimelineOfRanks() { ::setenv("WEFT_TIMELINE", file_.c_str(), 1); }

  static ProcessGroup join(const std::string& timeline = "") {
    ProcessGroupOptions options;
    options.backend = "tcp";
    options.device = c10::Device(c10::kCPU);
    options.timeline = timeline;
    return init_process_group(options);
  }

  // Counts the arrows of that name from one rank to another.
  int arrows(const std::string& name, int from, int to) const {
    std::map<std::uint64_t, int> starts;
    int count = 0;
    const auto json = nlohmann::json::parse(std::ifstream(file_));
    for (const auto& event : json.at("traceEvents")) {
      if (event.at("ph") == "s" && event.at("name") == name)
        starts[event.at("id")] = event.at("pid");
    }
    for (const auto& event : json.at("traceEvents")) {
      if (event.at("ph") != "f" || event.at("name") != name) continue;
      count += starts.at(event.at("id")) == from && event.at("pid") == to ? 1 : 0;
    }
    return count;
  }

  struct Drawn {
    std::string name;
    int rank = -1, peer = -1;
    double begin = 0, end = 0;
  };
  // Returns the spans of a kind, in the order in which they begin.
  std::vector<Drawn> spans(const std::string& kind) const {
    std::vector<Drawn> all;
    const auto json = nlohmann::json::parse(std::ifstream(file_));
    for (const auto& event : json.at("traceEvents")) {
      if (event.at("ph") != "X" || event.value("cat", "") != kind) continue;
      const double begin = event.at("ts");
      const auto& args = event.at("args");
      all.push_back({event.at("name"), event.at("pid"), args.value("peer", -1), begin,
                     begin + event.at("dur").get<double>()});
    }
    std::sort(all.begin(), all.end(),
              [](const Drawn& a, const Drawn& b) { return a.begin < b.begin; });
    return all;
  }

  std::map<std::string, int> arrows() const {
    std::map<std::string, int> count;
    const auto json = nlohmann::json::parse(std::ifstream(file_));
    for (const auto& event : json.at("traceEvents")) {
      if (event.at("ph") == "s") ++count[event.at("name")];
    }
    return count;
  }

  const harness::Folder kept_;
  const std::string folder_ = kept_.path();
  std::string file_ = folder_ + "/run.json";
};

TEST_F(TimelineOfRanks, HoldsAllOperationsWithArrows) {
  Processes ranks(2, [](int rank) {
    ProcessGroupOptions options;
    options.backend = "tcp";
    options.device = c10::Device(c10::kCPU);
    auto group = init_process_group(options);
    at::Tensor tensor = torch::ones({1000});
    for (int i = 0; i < 3; ++i) group.all_reduce(tensor).wait();
    if (rank == 0) {
      group.send(tensor, 1).wait();
    } else {
      group.recv(tensor).wait();  // from any rank: the sender is known only at the end
    }
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      EXPECT_EQ(agent.sync<&twice>("worker1", 21), 42);
    }
    agent.shutdown();
  });
  ranks.expect_success();
  const auto run = tools::read_run(file_);
  ASSERT_EQ(run.ranks.size(), 2u);
  EXPECT_TRUE(run.cut.empty());
  EXPECT_EQ(run.lost, 0u);
  const auto summary = tools::summarize(run);
  EXPECT_GE(summary.collectives, 3u);
  ASSERT_EQ(summary.links.size(), 1u);
  EXPECT_GE(summary.links[0].bytes, 4000u);
  EXPECT_EQ(summary.links[0].messages, 1u);
  EXPECT_EQ(summary.links[0].calls, 1u)
      << "calls that the program has not made, as in shutdown(), do not count";
  EXPECT_GT(summary.ranks.at(0).exposed, 0);
  const auto count = arrows();
  EXPECT_EQ(count.at("message"), 1);
  EXPECT_GE(count.at("collective"), 3);
  EXPECT_GE(count.at("call"), 1);
  EXPECT_GE(count.at("reply"), 1);
}

TEST_F(TimelineOfRanks, HoldsMeetingsOverTheStore) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    group.monitored_barrier(std::chrono::seconds(30));
    group.new_group({0, 1});
    group.split(rank, 0);
  });
  ranks.expect_success();
  std::multiset<std::string> names;
  for (const Drawn& meeting : spans("meeting")) names.insert(meeting.name);
  EXPECT_EQ(names, (std::multiset<std::string>{"monitored_barrier", "monitored_barrier",
                                               "new_group", "new_group", "split", "split"}));
}

TEST_F(TimelineOfRanks, OptionOverridesTheEnvironment) {
  const std::string other = folder_ + "/option.json";
  Processes ranks(2, [&](int rank) {
    auto group = join(other);
    at::Tensor tensor = torch::ones({10});
    group.all_reduce(tensor).wait();
    // Now the environment names another file, which is refused before any rank waits.
    const Error error = harness::error_of([&] { rpc::init("worker" + std::to_string(rank)); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), testing::HasSubstr("'" + file_ + "'"));
    EXPECT_THAT(error.text(), testing::HasSubstr("'" + other + "' already"));
    rpc::Options options;
    options.timeline = other;
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options);
    agent.shutdown();
  });
  ranks.expect_success();
  EXPECT_FALSE(std::filesystem::exists(file_));
  EXPECT_EQ(tools::read_run(other).ranks.size(), 2u);
}

// The ranks compare their files in init, and leave no timeline behind.
TEST_F(TimelineOfRanks, DifferentFilesErrorNamesBoth) {
  Processes ranks(2, [&](int rank) {
    const Error error =
        harness::error_of([&] { join(folder_ + "/" + std::to_string(rank) + ".json"); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
    for (const char* file : {"/0.json'", "/1.json'"})
      EXPECT_THAT(error.text(), testing::HasSubstr(folder_ + file));
  });
  ranks.expect_success();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

// Simulates machines without a common file system: a relative name is another file in each folder.
TEST_F(TimelineOfRanks, UnreadablePartsTravelToRankZero) {
  for (const char* machine : {"0", "1", "2"})
    std::filesystem::create_directory(folder_ + "/" + machine);
  ::setenv("WEFT_TIMELINE", "run.json", 1);
  Processes ranks(3, [&](int rank) {
    std::filesystem::current_path(folder_ + "/" + std::to_string(rank));
    auto group = join();
    at::Tensor tensor = torch::ones({1000});
    group.all_reduce(tensor).wait();
    if (rank == 0) group.send(tensor, 2).wait();
    if (rank == 2) group.recv(tensor, 0).wait();
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 1) {
      EXPECT_EQ(agent.sync<&twice>("worker0", 21), 42);
    }
    agent.shutdown();
  });
  ranks.expect_success();
  file_ = folder_ + "/0/run.json";
  const auto run = tools::read_run(file_);
  ASSERT_EQ(run.ranks.size(), 3u);
  EXPECT_TRUE(run.cut.empty());
  EXPECT_EQ(arrows("message", 0, 2), 1);
  EXPECT_GE(arrows("call", 1, 0), 1);
  for (const char* machine : {"1", "2"})
    EXPECT_TRUE(std::filesystem::is_empty(folder_ + "/" + machine)) << machine;
  EXPECT_FALSE(std::filesystem::exists(file_ + ".parts"));
}

// Runs `body` in a process whose clock is `seconds` ahead, by a time namespace, which only
// processes that are forked later enter. False if this user may not create one.
bool run_with_clock_ahead(int seconds, const std::function<void()>& body) {
  if (::unshare(CLONE_NEWTIME) != 0) return false;
  std::ofstream("/proc/self/timens_offsets") << "monotonic " << seconds << " 0" << std::flush;
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    trace::timeline::finish();
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return true;
}

// Simulates two machines.
TEST_F(TimelineOfRanks, DifferingClocksAreComparedTwice) {
  const pid_t probe = ::fork();
  if (probe == 0) ::_exit(run_with_clock_ahead(5000, [] {}) ? 0 : 1);
  int status = 0;
  ::waitpid(probe, &status, 0);
  if (status != 0)
    GTEST_SKIP() << "this user may not create a time namespace, which gives the second clock";
  Processes ranks(2, [](int rank) {
    const auto work = [] {
      auto group = join();
      at::Tensor tensor = torch::ones({1000});
      for (int i = 0; i < 3; ++i) group.all_reduce(tensor).wait();
    };
    if (rank == 0) {
      work();
    } else {
      EXPECT_TRUE(run_with_clock_ahead(5000, work));
    }
  });
  ranks.expect_success();
  const auto run = tools::read_run(file_);
  ASSERT_EQ(run.ranks.size(), 2u);
  EXPECT_EQ(run.ranks.at(0).clock_error, 0);
  EXPECT_GT(run.ranks.at(1).clock_error, 0);
  EXPECT_TRUE(run.ranks.at(1).clock_again);
  double first = 0, last = 0;  // microseconds
  for (const Drawn& span : spans("collective")) {
    first = std::min(first, span.begin);
    last = std::max(last, span.begin);
  }
  EXPECT_LT(last - first, 1e6 * static_cast<double>(std::chrono::seconds(harness::kLimit).count()))
      << "the clocks are 5000 s apart";
}

TEST_F(TimelineOfRanks, GradientsPointToBucketAndAllReduce) {
  Processes ranks(2, [](int rank) {
    auto group = join();
    torch::manual_seed(0);
    torch::nn::Linear model(20, 10);
    DistributedDataParallel ddp(model, group);
    for (int i = 0; i < 3; ++i) ddp(torch::ones({4, 20}) * (rank + 1)).sum().backward();
  });
  ranks.expect_success();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(arrows("starts", rank, rank), 3 * 2) << "weight and bias, in each step";
    EXPECT_GE(arrows("issues", rank, rank), 3);
  }
}

int value_of(RRef<int> reference) { return reference.to_here(); }

using Events = std::multiset<std::pair<std::string, int>>;  // an event of a reference, and its peer

// Rank 0 creates a reference on rank 1 and lends it to rank 2; both give it back.
TEST_F(TimelineOfRanks, HoldsTheEventsOfAReference) {
  const Events expected{{"creation came", 0},
                        {"fork", 2},
                        {"fork ended", 0},
                        {"fork ended", 2},
                        {"value released", -1}};
  Processes ranks(3, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      const auto reference = agent.remote<&twice>("worker1", 21);
      EXPECT_EQ(agent.sync<&value_of>("worker2", reference), 42);
    }
    agent.shutdown();
    if (rank != 1) return;
    Events recorded;
    for (const trace::Record& record : trace::flight_recorder().read()) {
      if (record.kind == trace::Kind::Reference) recorded.emplace(record.name, record.peer);
    }
    EXPECT_EQ(recorded, expected);
  });
  ranks.expect_success();
  Events drawn;
  for (const Drawn& event : spans("reference")) {
    if (event.rank == 1) drawn.emplace(event.name, event.peer);
  }
  EXPECT_EQ(drawn, expected);
}

at::Tensor doubled(at::Tensor x) { return x * 2; }

TEST_F(TimelineOfRanks, CallsShowFunctionAndBothEnds) {
  Processes ranks(3, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      EXPECT_EQ(agent.sync<&twice>("worker1", 1), 2);
      EXPECT_EQ(agent.async<&twice>("worker2", 2).get(), 4);
      EXPECT_EQ(agent.remote<&twice>("worker1", 3).to_here(), 6);
      agent.sync_op("aten::mul", "worker2", torch::ones({2}), torch::ones({2}));
      EXPECT_EQ(agent.sync<&twice_there>("worker1", 5), 10);
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&agent, t] {
          for (int i = 0; i < 10; ++i) {
            EXPECT_EQ(t == 0 ? agent.sync<&twice>(1, i) : agent.sync<&twice_there>(1, i), 2 * i);
          }
        });
      }
      for (auto& thread : threads) thread.join();
    }
    agent.shutdown();
  });
  ranks.expect_success();
  struct Ends {
    int calls = 0, served = 0;
  };
  std::map<std::tuple<std::string, int, int>, Ends> seen;  // function, from, to
  const auto is_ours = [](const Drawn& span) {
    return span.name.find("twice") != std::string::npos ||
           span.name.find("aten::") != std::string::npos;
  };
  for (const Drawn& call : spans("call")) {
    if (is_ours(call)) ++seen[{call.name, call.rank, call.peer}].calls;
  }
  for (const Drawn& served : spans("served")) {
    if (is_ours(served)) ++seen[{served.name, served.peer, served.rank}].served;
  }
  std::map<std::pair<int, int>, int> hops;
  for (const auto& [what, ends] : seen) {
    EXPECT_EQ(ends.calls, ends.served) << std::get<0>(what);
    hops[{std::get<1>(what), std::get<2>(what)}] += ends.calls;
  }
  const std::map<std::pair<int, int>, int> expected{
      {{0, 1}, 3 + 30}, {{0, 2}, 2}, {{1, 2}, 1 + 20}};
  EXPECT_EQ(hops, expected);
  EXPECT_GE(arrows("call", 1, 2), 21);
  // A second hop lies within the call that made it.
  for (const Drawn& hop : spans("call")) {
    if (hop.rank != 1 || !is_ours(hop)) continue;
    const auto served = spans("served");
    EXPECT_TRUE(std::any_of(served.begin(), served.end(), [&](const Drawn& one) {
      return one.rank == 1 && one.peer == 0 && one.begin <= hop.begin && hop.end <= one.end;
    }));
  }
}

TEST_F(TimelineOfRanks, CallsInAContextAreAlsoTraced) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      const at::Tensor x = torch::ones({10}, torch::requires_grad());
      for (const bool profiled_first : {false, true}) {
        std::optional<trace::Range> outside;
        if (profiled_first) outside.emplace(ours);
        AutogradContext context(agent);
        const trace::Range inside(ours);
        context.backward({agent.sync<&doubled>("worker1", x).sum()});
        EXPECT_TRUE(context.gradient(x).equal(torch::full({10}, 2.0)));
      }
    }
    agent.shutdown();
  });
  ranks.expect_success();
  const auto of_context = [](const Drawn& span) {
    return span.name.find("doubled") != std::string::npos;
  };
  const auto calls = spans("call"), served = spans("served");
  EXPECT_EQ(std::count_if(calls.begin(), calls.end(), of_context), 2);
  EXPECT_EQ(std::count_if(served.begin(), served.end(), of_context), 2);
  EXPECT_EQ(arrows("gradient", 0, 1), 2);
  EXPECT_EQ(arrows("gradient", 1, 0), 2);
}

TEST_F(TimelineOfRanks, GradientsAndCallsPointToTheirWork) {
  Processes ranks(2, [](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      AutogradContext context(agent);
      const at::Tensor x = torch::ones({10}, torch::requires_grad());
      context.backward({agent.sync<&doubled>("worker1", x).sum()});
      EXPECT_TRUE(context.gradient(x).equal(torch::full({10}, 2.0)));
    }
    agent.shutdown();
  });
  ranks.expect_success();
  EXPECT_EQ(arrows("gradient", 0, 1), 1);
  EXPECT_EQ(arrows("gradient", 1, 0), 1);
  EXPECT_GE(arrows("runs", 0, 0), 2) << "what the gradient starts, and the roots";
  EXPECT_GE(arrows("runs", 1, 1), 2) << "what the gradient starts, and the called function";
}

}  // namespace
}  // namespace weft
