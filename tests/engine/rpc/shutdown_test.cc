// The end of agents: group RS of the behaviours.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/tests/engine/rpc/workers.h>

namespace ends {

using namespace weft;

std::atomic<int> steps{0};

// A chain of calls that nobody waits for: each hop starts the next and returns at once.
void wander(int hops) {
  ++steps;
  auto& agent = rpc::this_agent();
  const int workers = static_cast<int>(agent.workers().size());
  if (hops > 0) agent.async<&wander>((agent.self().rank + 1) % workers, hops - 1);
}
// The same in continuations.
void wander_on(int hops) {
  ++steps;
  if (hops == 0) return;
  rpc::this_agent().async<&wander>(rpc::this_call().caller, 0).then([hops] {
    rpc::this_agent().async<&wander_on>(rpc::this_call().caller, hops - 1);
  });
}
at::Tensor heavy(at::Tensor a) {
  for (int i = 0; i < 200; ++i) a.add_(0.001);
  return a;
}
void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace ends

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_alone;
using harness::run_workers;
using harness::Setting;
using namespace std::chrono_literals;

class Shutdown : public testing::TestWithParam<Setting> {};

TEST_P(Shutdown, WaitsForCallsThatCallsCause) {
  ends::steps = 0;
  const int workers = GetParam().workers;
  const bool threads = GetParam().as == As::Threads;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank == 0) agent.async<&ends::wander>(1, 200);
  });
  if (threads) {
    EXPECT_EQ(ends::steps, 201) << workers;
  }
}

TEST_P(Shutdown, WaitsForCallsThatContinuationsCause) {
  ends::steps = 0;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank == 0) agent.async<&ends::wander_on>(1, 50);
  });
  if (GetParam().as == As::Threads) {
    EXPECT_EQ(ends::steps, 101);
  }
}

TEST_P(Shutdown, RS002_ServesAnUnevenLoadToTheEnd) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    for (const int to : {1, last}) {
      std::vector<Future<at::Tensor>> calls;
      for (int i = 0; i < 30; ++i) calls.push_back(agent.async<&ends::heavy>(to, at::zeros({50, 50})));
      for (auto& call : calls) EXPECT_NEAR(call.get()[0][0].item<float>(), 0.2, 1e-3);
    }
  });
}

TEST_P(Shutdown, RS003_TwiceIsOnce) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    agent.shutdown({.timeout = 30s});
    agent.shutdown({.timeout = 30s});
    const auto info = agent.debug_info();
    EXPECT_EQ(info.calls_served + info.calls_waiting + info.handlers_busy, 0U);
  });
}

TEST_P(Shutdown, RS007_LeavingIsPossibleAtAnyTime) {
  run_alone(GetParam(), [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    agent.leave();
    agent.leave();
    agent.shutdown();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Shutdown,
                         testing::Values(Setting{As::Threads, "inproc", 2}, Setting{As::Threads, "shm", 4},
                                         Setting{As::Threads, "tcp", 4}, Setting{As::Processes, "shm", 2},
                                         Setting{As::Processes, "tcp", 4}),
                         [](const auto& setting) { return harness::name(setting.param); });

TEST(ShutdownLimits, RS004_WhoIsStillBusyIsNamedOnEveryWorker) {
  run_alone({As::Threads, "inproc", 3}, [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 0) agent.async<&ends::pause>(1, 300);
    const auto error = error_of([&] { agent.shutdown({.timeout = 10ms}); });
    EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost) << error.what();
    EXPECT_EQ(error_of([&] { agent.sync<&ends::pause>(1, 1); }).blame(), Blame::Caller);
  });
}

TEST(ShutdownLimits, AWorkerThatDoesNotComeIsATimeout) {
  run_alone({As::Threads, "inproc", 2}, [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 1) {
      agent.sync<&ends::pause>(1, 100);
      return;
    }
    const auto error = error_of([&] { agent.shutdown({.timeout = 20ms}); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
  });
}

TEST(AgentLife, RB039_AnAgentCanBeMadeAgain) {
  for (int life = 0; life < 3; ++life) {
    run_workers({As::Threads, "shm", 2}, [](rpc::Agent& agent) { agent.sync<&ends::pause>(1 - agent.self().rank, 0); });
  }
}

TEST(AgentLife, RB040_041_WorkersMayComeLaterAndGo) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank), {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent first = join(0);
  {
    rpc::Agent second = join(1);
    second.sync<&ends::pause>(0, 0);
    first.sync<&ends::pause>("worker1", 0);
    {
      rpc::Agent third = join(2);
      third.sync<&ends::pause>(1, 0);
      first.sync<&ends::pause>(2, 0);
      EXPECT_EQ(first.workers().size(), 3U);
      third.shutdown();
    }
    EXPECT_EQ(first.workers().size(), 2U);
    second.shutdown();
  }
  // Its connection may end a moment later.
  while (error_of([&] { first.sync<&ends::pause>("worker1", 0); }).blame() == Blame::PeerLost) {
  }
  EXPECT_EQ(error_of([&] { first.sync<&ends::pause>("worker1", 0); }).blame(), Blame::Caller);
  first.shutdown();
}

TEST(AgentLife, RE032_033_OpenJobsNeedARankAndTakeNoFixedWorkers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(error_of([&] { rpc::init("a", {.store = store}); }).blame(), Blame::Caller);
  EXPECT_EQ(error_of([&] { rpc::init("a", {.init_method = "tcp://127.0.0.1:1"}); }).blame(), Blame::Caller);
  rpc::Agent open = rpc::init("a", {.rank = 0, .store = store});
  const auto error = error_of([&] { rpc::init("b", {.rank = 1, .world_size = 2, .store = store}); });
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
}

}  // namespace
}  // namespace weft
