// SPDX-License-Identifier: Apache-2.0
// How agents shut down and leave.
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/tests/engine/rpc/workers.h>
#include <weft/transport/inproc/faults.h>

namespace weft::rpc::internal {
Future<Outcome> join_shutdown();  // shutdown() calls this on rank 0
}

namespace ends {

using namespace weft;

std::atomic<int> steps{0};

// A chain of calls whose results nobody awaits: each starts the next and returns at once.
void wander(int hops) {
  ++steps;
  auto& agent = rpc::this_agent();
  const int workers = static_cast<int>(agent.workers().size());
  if (hops > 0) agent.async<&wander>((agent.self().rank + 1) % workers, hops - 1);
}
// The same, with the next call made in a continuation.
void wander_on(int hops) {
  ++steps;
  if (hops == 0) return;
  rpc::this_agent().async<&wander>(rpc::this_call().caller, 0).then([hops] {
    rpc::this_agent().async<&wander_on>(rpc::this_call().caller, hops - 1);
  });
}
at::Tensor doubled(at::Tensor a) { return a + a; }
at::Tensor heavy(at::Tensor a) {
  for (int i = 0; i < 200; ++i) a.add_(0.001);
  return a;
}
at::Tensor made() { return at::ones({2}); }
// Counts how many live.
struct Counted {
  Counted() { ++living; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { --living; }
  inline static std::atomic<int> living{0};
};
std::atomic<int> told{0};
void tell() { ++told; }
RRef<at::Tensor> keep_given(RRef<at::Tensor> given) { return given; }
// Never answers, and holds no thread.
std::atomic<bool> come{false}, heard{false};
Future<void> never() {
  static Promise<void> promise;
  come = true;
  return promise.future();
}
int number(int value) { return value; }
void until_cancelled() {
  while (!rpc::this_call().cancelled) std::this_thread::yield();
}
at::Tensor large() { return at::ones({1 << 20}); }
void until_come() {
  while (!come) std::this_thread::yield();
}
std::string shut_down() {
  try {
    rpc::this_agent().shutdown();
  } catch (const Error& error) {
    return error.what();
  }
  return "it has shut down";
}
void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

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

TEST_P(Shutdown, WaitsForCallsMadeByCalls) {
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

TEST_P(Shutdown, WaitsForCallsOfContinuations) {
  ends::steps = 0;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank == 0) agent.async<&ends::wander_on>(1, 50);
  });
  if (GetParam().as == As::Threads) {
    EXPECT_EQ(ends::steps, 101);
  }
}

TEST_P(Shutdown, ServesAnUnevenLoadToTheEnd) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    for (const int to : {1, last}) {
      std::vector<Future<at::Tensor>> calls;
      for (int i = 0; i < 30; ++i)
        calls.push_back(agent.async<&ends::heavy>(to, at::zeros({50, 50})));
      for (auto& call : calls) EXPECT_NEAR(call.get()[0][0].item<float>(), 0.2, 1e-3);
      std::vector<Future<at::Tensor>> sparse;
      for (int i = 0; i < 30; ++i)
        sparse.push_back(agent.async<&ends::doubled>(to, at::eye(8).to_sparse()));
      for (auto& call : sparse) EXPECT_TRUE(at::equal(call.get().to_dense(), at::eye(8) * 2));
    }
  });
}

TEST_P(Shutdown, SecondOneDoesNothing) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    agent.shutdown({.timeout = 30s});
    const auto served = agent.debug_info().calls_served;
    EXPECT_GT(served, 0U) << "shutdown() itself makes calls";
    agent.shutdown({.timeout = 30s});
    const auto info = agent.debug_info();
    EXPECT_EQ(info.calls_served, served);
    EXPECT_EQ(info.calls_waiting + info.handlers_busy, 0U);
  });
}

TEST_P(Shutdown, LeavingIsPossibleAfterCalls) {
  ends::told = 0;
  const bool is_here = GetParam().as == As::Threads;  // counts all workers' calls
  run_alone(GetParam(), [is_here](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    const auto workers = agent.workers();
    std::vector<Future<void>> calls;
    for (const auto& worker : workers) calls.push_back(agent.async<&ends::tell>(worker));
    for (const auto& call : calls) {
      try {
        call.wait();
      } catch (const Error& error) {  // the callee has left before it answered
        EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      }
    }
    const int all = static_cast<int>(workers.size());
    while (ends::told < (is_here ? all * all : all)) std::this_thread::yield();
    agent.leave();
    EXPECT_EQ(error_of([&] { agent.sync<&ends::pause>(0, 0); }).blame(), Blame::Caller);
  });
}

TEST_P(Shutdown, LeavingIsPossibleAtAnyTime) {
  run_alone(GetParam(), [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    agent.leave();
    agent.leave();
    agent.shutdown();
  });
}

TEST_P(Shutdown, LeavingFailsPendingCallsAtOnce) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "a process that ends after its agent would end the connections itself";
  ends::come = ends::heard = false;
  run_alone(GetParam(), [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 0) {
      while (!ends::come) std::this_thread::yield();
      agent.leave();
      while (!ends::heard) std::this_thread::yield();  // only the connections tell the others
    } else if (agent.self().rank == 1) {
      const auto never = agent.async<&ends::never>(0);
      const Error error = error_of([&] { never.wait(30s); });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      EXPECT_EQ(error_of([&] { agent.sync<&ends::tell>(rpc::to(0).timeout(30s)); }).blame(),
                Blame::PeerLost);
      ends::heard = true;
    }
    agent.leave();
  });
}

// Each worker calls all others, and then all shut down at once.
class ShutdownOfMany : public Shutdown {};

TEST_P(ShutdownOfMany, EndsOnceAllAreIdle) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& worker : agent.workers()) agent.async<&ends::wander>(worker, 3);
    agent.shutdown({.timeout = 40s});
    const auto info = agent.debug_info();
    EXPECT_EQ(info.calls_waiting + info.handlers_busy, 0U);
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, ShutdownOfMany, testing::ValuesIn(harness::settings()),
                         harness::name_of);
INSTANTIATE_TEST_SUITE_P(Rpc, Shutdown, testing::ValuesIn(harness::settings()), harness::name_of);

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(ShutdownLeaks, RemainingReferencesAreReported) {
  std::vector<RRef<at::Tensor>> kept;
  int line = 0;
  const auto logged = harness::warnings_of(3, [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    line = __LINE__ + 1;
    kept.push_back(agent.remote<&ends::made>("worker1"));
    kept.push_back(agent.sync<&ends::keep_given>(1, agent.remote<&ends::made>(2)));
    agent.remote<&ends::made>(1).to_here();  // dropped at once
  });
  EXPECT_EQ(count_of(logged, "still holds"), 1U) << logged;
  EXPECT_NE(logged.find("worker0 (rank 0) shuts down while its program still holds 2 references"),
            std::string::npos)
      << logged;
  EXPECT_NE(logged.find("of worker1 (rank 1), made by remote<ends::made> at "), std::string::npos)
      << logged;
  EXPECT_NE(logged.find("shutdown_test.cc:" + std::to_string(line)), std::string::npos)
      << line << ": " << logged;
  EXPECT_NE(logged.find("of worker2 (rank 2), sent by rank 1"), std::string::npos) << logged;
}

TEST(ShutdownLeaks, NothingIsReportedIfNoneRemain) {
  const auto logged = harness::warnings_of(3, [](rpc::Agent& agent) {
    const RRef<at::Tensor> mine(agent, at::ones({1}));  // its own value ends with the agent
    const auto there = agent.remote<&ends::made>(1);
    agent.sync<&ends::keep_given>(2, there).to_here();
  });
  EXPECT_EQ(logged, "");
}

// The holder never tells the owner that its reference has ended, so only the owner's shutdown() or
// leave() releases the value.
TEST(ShutdownLeaks, OwnersEndReleasesACycle) {
  struct Knot {
    RRef<ends::Counted> reference;
    std::shared_ptr<Knot> self;
  };
  for (const bool is_graceful : {true, false}) {
    std::shared_ptr<Knot> knot = std::make_shared<Knot>();
    knot->self = knot;
    std::promise<void> is_held, has_left;
    run_workers({As::Threads, "shm", 2}, [&](rpc::Agent& agent) {
      const bool is_owner = agent.self().rank == 1;
      if (is_owner) {
        is_held.get_future().wait();
        EXPECT_EQ(agent.debug_info().owner_rrefs, 1U);
        EXPECT_EQ(agent.debug_info().forks, 1U);
        EXPECT_EQ(ends::Counted::living, 1);
      } else {
        knot->reference = agent.remote<ends::Counted>(1);
        knot->reference.created().get();
        is_held.set_value();
        if (!is_graceful) has_left.get_future().wait();  // the owner leaves first
      }
      is_graceful ? agent.shutdown({.timeout = 30s}) : agent.leave();
      const auto info = agent.debug_info();
      EXPECT_EQ(info.owner_rrefs + info.forks + info.calls_waiting + info.handlers_busy, 0U)
          << agent.self().name;
      if (!is_owner) return;
      EXPECT_EQ(ends::Counted::living, 0)
          << "the value must end though the owner's agent and the holder's reference still exist";
      if (!is_graceful) has_left.set_value();
    });
    knot->self.reset();
  }
}

TEST(ShutdownLeaks, LostCreationsDoNotDelayIt) {
  run_workers({As::Threads, "inproc", 3},
              [](rpc::Agent& agent) {
                const auto to = harness::after(agent, 1);
                {
                  const auto lost = agent.remote<&ends::made>(rpc::to(to.rank).timeout(20ms));
                  EXPECT_THROW(lost.to_here(), rpc::CreationError);
                  const auto another = agent.remote<&ends::made>(rpc::to(to.rank).timeout(20ms));
                }
                agent.sync<&ends::pause>(to, 0);
              },
              {.faults = {.drop = {rpc::MessageKind::Create}}});
}

TEST(ShutdownLimits, BusyWorkersAreNamedEverywhere) {
  run_alone({As::Threads, "inproc", 3}, [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    const bool decides = agent.self().rank == 0;
    if (agent.self().rank == 2) agent.async<&ends::until_cancelled>(rpc::to(1).timeout(0ms));
    agent.sync<&ends::number>(harness::after(agent, 1), 1);
    const auto error = error_of([&] { agent.shutdown({.timeout = decides ? 1s : 30s}); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_NE(error.text().find("still busy: worker1 (rank 1) (0 calls wait, 1 function runs), "
                                "worker2 (rank 2) (1 call waits, 0 functions run)"),
              std::string::npos)
        << error.text();
  });
}

TEST(ShutdownLimits, ShortLimitFailsEveryWorker) {
  run_alone({As::Threads, "inproc", 3}, [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 0) agent.async<&ends::pause>(1, 300);
    const auto error = error_of([&] { agent.shutdown({.timeout = 10ms}); });
    EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost)
        << error.what();
    EXPECT_EQ(error.text().find("internal"), std::string::npos) << error.what();
    EXPECT_EQ(error_of([&] { agent.sync<&ends::pause>(1, 1); }).blame(), Blame::Caller);
  });
}

TEST(ShutdownLimits, FirstTimedOutWorkerIsNotLost) {
  run_alone({As::Threads, "inproc", 3}, [](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 2) agent.async<&ends::until_cancelled>(rpc::to(1).timeout(0ms));
    agent.sync<&ends::number>(harness::after(agent, 1), 1);
    const bool is_impatient = agent.self().rank == 1;
    const auto error = error_of([&] { agent.shutdown({.timeout = is_impatient ? 1s : 30s}); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    if (is_impatient) return;
    EXPECT_NE(error.text().find("worker1 (rank 1) has left: the limit of its shutdown() was over"),
              std::string::npos)
        << error.text();
    EXPECT_NE(error.text().find("still busy: worker1 (rank 1)"), std::string::npos) << error.text();
  });
}

TEST(ShutdownLimits, TimeoutNamesTheMissingWorker) {
  for (const int away : {0, 1}) {
    std::promise<void> has_ended;
    run_alone({As::Threads, "inproc", 2}, [&, away](const rpc::Options& options) {
      rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
      if (agent.self().rank == away) return has_ended.get_future().wait();
      const auto error = error_of([&] { agent.shutdown({.timeout = 20ms}); });
      has_ended.set_value();
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      const std::string said =
          away == 0 ? "worker0 (rank 0) has not said in time that all workers are idle"
                    : "shutdown() has not been called in time by worker1 (rank 1)";
      EXPECT_NE(error.text().find(said), std::string::npos) << error.text();
    });
  }
}

// Runs three workers, of which `late` calls shutdown() only once a line about waiting is logged.
// Returns these lines.
std::vector<std::string> lines_where_one_comes_late(int late) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> lines;
  const log::Capture capture([&](LogLevel level, std::string_view line) {
    if (level != LogLevel::Warn || line.find("wait") == std::string_view::npos) return;
    {
      std::lock_guard lock(mutex);
      lines.emplace_back(line);
    }
    changed.notify_all();
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> workers;
  for (int rank = 0; rank < 3; ++rank) {
    workers.emplace_back([&, rank] {
      rpc::Options options{.rank = rank, .world_size = 3, .store = store, .transports = {"inproc"}};
      options.wait_reports = {100ms};
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options);
      if (rank == late) {
        std::unique_lock lock(mutex);
        EXPECT_TRUE(changed.wait_for(lock, 30s, [&] { return !lines.empty(); }))
            << "no line about waiting is logged";
      }
      agent.shutdown();
    });
  }
  for (std::thread& worker : workers) worker.join();
  return lines;
}

TEST(ShutdownLimits, WaitReportNamesTheMissingWorker) {
  const auto lines = lines_where_one_comes_late(1);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("worker0"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("in shutdown(): "), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("worker1"), std::string::npos) << lines[0];
  EXPECT_EQ(lines[0].find("worker2"), std::string::npos) << lines[0];
}

TEST(ShutdownLimits, LateRankZeroNamesItsWaiters) {
  const auto lines = lines_where_one_comes_late(0);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("worker0 (rank 0), which has not called it"), std::string::npos)
      << lines[0];
  EXPECT_NE(lines[0].find("worker1"), std::string::npos) << lines[0];
}

TEST(ShutdownLimits, FailsInFunctionsAndContinuations) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    const std::string said = "call shutdown() on a thread of the program's own";
    if (agent.self().rank != 0) return;
    for (const auto& worker : agent.workers()) {
      EXPECT_NE(agent.sync<&ends::shut_down>(worker).find(said), std::string::npos);
      EXPECT_NE(agent.sync<rpc::inline_<&ends::shut_down>>(worker).find(said), std::string::npos);
      ends::come = false;
      const auto continued =
          agent.async<&ends::until_come>(worker).then([&agent] { agent.shutdown(); });
      ends::come = true;
      const auto error = error_of([&] { continued.get(); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_NE(error.text().find(said), std::string::npos) << error.text();
      EXPECT_EQ(agent.sync<&ends::number>(worker, 3), 3) << "the agent must still serve";
    }
  });
}

// The message with the reason waits behind a large reply, on a way that the test holds.
TEST(ShutdownLimits, FailedWorkerStaysUntilOthersKnow) {
  std::mutex mutex;
  std::vector<transport::inproc::Faults> backs;
  transport::inproc::on_link([&](const auto&, const auto& back) {
    std::lock_guard lock(mutex);
    backs.push_back(back);
  });
  std::promise<void> comes, has_left;
  // Which of the two depends on whether the question about activity was written before the way was
  // held.
  const auto says_why = [](const Error& error) {
    return error.text().find("still busy") != std::string::npos ||
           error.text().find("worker1 (rank 1) has not said in time what is active there") !=
               std::string::npos;
  };
  run_alone({As::Threads, "inproc", 2}, [&](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 0) {
      comes.get_future().wait();
      const auto error = error_of([&] { agent.shutdown({.timeout = 1s}); });
      EXPECT_TRUE(says_why(error)) << error.text();
      return has_left.set_value();
    }
    EXPECT_EQ(agent.sync<&ends::number>(0, 1), 1);
    const auto back = [&] {
      std::lock_guard lock(mutex);
      return backs.at(0);
    }();
    back.hold_at(back.written());
    const auto large = agent.async<&ends::large>(0);
    std::thread releases([&] {
      // Long after the other's limit. If the other did not wait, it would have left at once.
      has_left.get_future().wait_for(3s);
      back.release();
    });
    comes.set_value();
    const auto error = error_of([&] { agent.shutdown({.timeout = 30s}); });
    EXPECT_TRUE(says_why(error)) << error.text();
    releases.join();
  });
  transport::inproc::on_link({});
}

// The others wait for rank 0's last message, which is delayed.
TEST(ShutdownLimits, ItsMessagesMayBeLate) {
  rpc::Options options;
  options.faults.delay[rpc::MessageKind::Shutdown] = 100ms;
  run_workers(
      {As::Threads, "inproc", 3}, [](rpc::Agent& agent) { agent.shutdown({.timeout = 30s}); },
      options);
}

TEST(ShutdownLimits, LeavingEndsIt) {
  std::promise<void> ended;
  run_alone({As::Threads, "inproc", 2}, [&](const rpc::Options& options) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (agent.self().rank == 1) return ended.get_future().wait();
    std::thread leaver([&] {
      std::this_thread::sleep_for(50ms);
      agent.leave();
    });
    try {
      agent.shutdown({.timeout = 0ms});  // returns if leave() was faster
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Cancelled) << error.text();
    }
    leaver.join();
    ended.set_value();
  });
}

// shutdown() sends one such request only, but a foreign program may send more.
TEST(ShutdownLimits, RepeatedRequestFailsTheFirstOne) {
  rpc::Options options;
  options.faults.fail_first = {{rpc::MessageKind::Reply, 0}};  // refuses none, but looks each up
  run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank == 0) return;
        const auto first = agent.async<rpc::inline_<&rpc::internal::join_shutdown>>(0);
        const auto second = agent.async<rpc::inline_<&rpc::internal::join_shutdown>>(0);
        EXPECT_EQ(error_of([&] { first.wait(20s); }).blame(), Blame::Remote);
      },
      options);
}

// Both return once the shutdown has ended, with its outcome.
TEST(ShutdownLimits, ConcurrentOnesShareTheOutcome) {
  for (const bool fails : {false, true}) {
    std::promise<void> called, one_has_returned;
    run_alone({As::Threads, "inproc", 2}, [&](const rpc::Options& options) {
      rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
      if (agent.self().rank == 1) {
        called.get_future().wait();
        EXPECT_EQ(one_has_returned.get_future().wait_for(300ms), std::future_status::timeout)
            << "shutdown() returns before all workers have called it";
        return fails ? agent.leave() : agent.shutdown({.timeout = 30s});
      }
      std::once_flag first;
      std::vector<std::optional<Error>> outcomes(2);
      std::vector<std::thread> threads;
      for (auto& outcome : outcomes) {
        threads.emplace_back([&] {
          try {
            agent.shutdown({.timeout = 30s});
          } catch (const Error& error) {
            outcome = error;
          }
          std::call_once(first, [&] { one_has_returned.set_value(); });
          EXPECT_EQ(error_of([&] { agent.sync<&ends::pause>(1, 0); }).blame(), Blame::Caller)
              << "this worker has left";
        });
      }
      called.set_value();
      for (auto& thread : threads) thread.join();
      for (const auto& outcome : outcomes) {
        ASSERT_EQ(outcome.has_value(), fails);
        if (!fails) continue;
        EXPECT_EQ(outcome->blame(), Blame::PeerLost) << outcome->what();
        EXPECT_EQ(outcome->text(), outcomes.front()->text());
      }
    });
  }
}

}  // namespace
}  // namespace weft
