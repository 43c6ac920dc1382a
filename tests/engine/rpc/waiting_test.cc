// SPDX-License-Identifier: Apache-2.0
// Futures of calls, and waits for several of them.
#include <atomic>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/future/when_all.h>
#include <weft/tests/engine/rpc/workers.h>

namespace waiting {

using namespace weft;

int plus(int a, int b) { return a + b; }
int throws(int number) { throw std::runtime_error("number " + std::to_string(number)); }

// Calls a third worker and attaches a continuation to that call, while its own caller waits.
int plus_by_third(rpc::WorkerInfo third, int a, int b) {
  return rpc::this_agent().async<&plus>(third, a, b).then([](int sum) { return sum + 10; }).get();
}
// Answers by a promise that a continuation of a nested call sets.
Future<int> plus_by_promise(rpc::WorkerInfo third, int a, int b) {
  Promise<int> promise;
  rpc::this_agent().async<&plus>(third, a, b).on_done([promise](const Future<int>& sum) {
    promise.set(sum.get() + 100);
  });
  return promise.future();
}
Future<int> added_twenty_times(int start) {
  Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < 20; ++i) future = future.then([](int value) { return value + 3; });
  promise.set(start);
  return future;
}
Future<int> calls_back_deferred(rpc::WorkerInfo first, int start) {
  return rpc::this_agent().async<&added_twenty_times>(first, start).then([](int sum) {
    return sum + 1;
  });
}

struct Multiplier {
  explicit Multiplier(int by) : factor(by) {}
  Future<int> times(int a) {
    return rpc::this_agent().async<&plus>(rpc::this_call().caller, a, 0).then([this](int b) {
      return factor * b;
    });
  }
  static Future<int> four_times(int a) { return Future<int>::ready(4 * a); }
  static Future<int> of(const Multiplier& multiplier, int a) {
    return Future<int>::ready(multiplier.factor * a);
  }
  int factor;
};

// Blocks until the test releases the mutex.
std::mutex held;
int after_release(int value) {
  std::lock_guard lock(held);
  return value;
}

}  // namespace waiting

namespace weft {
namespace {

using harness::after;
using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using namespace std::chrono_literals;

class Waiting : public testing::TestWithParam<Setting> {};

TEST_P(Waiting, WaitAllWaitsForAsynchronousCalls) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    Future<int> kept;
    EXPECT_EQ(rpc::wait_all([&] { kept = agent.async<&waiting::plus>(to, 1, 2); }), 1U);
    EXPECT_TRUE(kept.done());
    std::vector<Future<int>> all;
    const auto tracked = rpc::wait_all([&] {
      for (int i = 0; i < 20; ++i) {
        all.push_back(agent.async<&waiting::plus>(to, i, 1));
        EXPECT_EQ(agent.sync<&waiting::plus>(to, i, 2), i + 2);
      }
    });
    EXPECT_EQ(tracked, 20U) << "synchronous calls must not be tracked";
    for (const auto& call : all) EXPECT_TRUE(call.done());
    kept = agent.async<&waiting::plus>(to, 3, 4);  // outside of wait_all(), so it is not tracked
    EXPECT_EQ(rpc::wait_all([] {}), 0U);
    EXPECT_EQ(kept.get(), 7);
    const auto outer = rpc::wait_all([&] {
      agent.async<&waiting::plus>(to, 0, 0);
      EXPECT_EQ(rpc::wait_all([&] { agent.async<&waiting::plus>(to, 0, 0); }), 1U);
    });
    EXPECT_EQ(outer, 1U);
  });
}

TEST_P(Waiting, WaitAllThrowsAndForgetsItsCalls) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    std::vector<Future<int>> calls;
    const auto remote = error_of([&] {
      rpc::wait_all([&] {
        calls.push_back(agent.async<&waiting::throws>(to, 1));
        calls.push_back(agent.async<&waiting::throws>(to, 2));
        calls.push_back(agent.async<&waiting::plus>(to, 1, 1));
      });
    });
    EXPECT_EQ(remote.blame(), Blame::Remote);
    EXPECT_NE(remote.text().find("number 1"), std::string::npos) << remote.what();
    for (const auto& call : calls) EXPECT_TRUE(call.done());
    Future<int> begun;
    EXPECT_THROW(rpc::wait_all([&] {
                   begun = agent.async<&waiting::plus>(to, 1, 1);
                   throw std::out_of_range("in the body");
                 }),
                 std::out_of_range);
    EXPECT_TRUE(begun.done());
    EXPECT_EQ(rpc::wait_all([] {}), 0U);
  });
}

TEST_P(Waiting, CalleeMayAttachToAnotherCall) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&waiting::plus_by_third>(after(agent, 1), after(agent, 2), 1, 2), 13);
  });
}

TEST_P(Waiting, CallbacksRunInOrderOfAttaching) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::mutex mutex;
    std::vector<std::string> order;
    const auto note = [&](const char* what) {
      std::lock_guard lock(mutex);
      order.emplace_back(what);
    };
    auto good = agent.async<&waiting::plus>(after(agent, 1), 1, 2);
    good.on_done([&] { note("done"); });
    const auto last = good.then([&](int sum) {
      note("then");
      return sum;
    });
    EXPECT_EQ(last.get(), 3);
    EXPECT_EQ(order, (std::vector<std::string>{"done", "then"}));
    EXPECT_TRUE(good.done());
    EXPECT_FALSE(good.failed());
    auto bad = agent.async<&waiting::throws>(after(agent, 1), 1);
    EXPECT_EQ(error_of([&] { bad.wait(); }).blame(), Blame::Remote);
    EXPECT_TRUE(bad.done());
    EXPECT_TRUE(bad.failed());
  });
}

TEST_P(Waiting, ContinuationMayKeepAPromise) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&waiting::plus_by_promise>(after(agent, 1), after(agent, 2), 1, 2), 103);
    Promise<int> promise;
    agent.async<&waiting::plus>(after(agent, 1), 1, 2).on_done([promise](const Future<int>& sum) {
      promise.set(sum.get());
    });
    EXPECT_EQ(promise.future().get(), 3);
  });
}

TEST_P(Waiting, RepliesMayBeDeferredInAllModes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      EXPECT_EQ(agent.sync<&waiting::added_twenty_times>(to, 1), 61);
      EXPECT_EQ(agent.async<&waiting::added_twenty_times>(to, 1).get(), 61);
      EXPECT_EQ(agent.remote<&waiting::added_twenty_times>(to, 1).to_here(), 61);
      EXPECT_EQ(agent.sync<&waiting::calls_back_deferred>(to, agent.self(), 1), 62);
      EXPECT_EQ(agent.async<&waiting::calls_back_deferred>(to, agent.self(), 1).get(), 62);
      EXPECT_EQ(agent.remote<&waiting::calls_back_deferred>(to, agent.self(), 1).to_here(), 62);
      EXPECT_EQ(agent.sync<&waiting::plus_by_promise>(to, after(agent, 2), 1, 2), 103);
      EXPECT_EQ(agent.remote<&waiting::plus_by_promise>(to, after(agent, 2), 1, 2).to_here(), 103);
    }
  });
}

TEST_P(Waiting, MethodsMayDeferTheirReplies) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      EXPECT_EQ(agent.sync<&waiting::Multiplier::four_times>(to, 3), 12);
      EXPECT_EQ(agent.async<&waiting::Multiplier::four_times>(to, 3).get(), 12);
      EXPECT_EQ(agent.remote<&waiting::Multiplier::four_times>(to, 3).to_here(), 12);
      const auto three = agent.remote<waiting::Multiplier>(to, 3);
      EXPECT_EQ(three.sync<&waiting::Multiplier::times>(5), 15);
      EXPECT_EQ(three.async<&waiting::Multiplier::times>(5).get(), 15);
      EXPECT_EQ(three.remote<&waiting::Multiplier::times>(5).to_here(), 15);
      EXPECT_EQ(three.sync<&waiting::Multiplier::four_times>(5), 20);
      EXPECT_EQ(three.async<&waiting::Multiplier::four_times>(5).get(), 20);
      EXPECT_EQ(three.remote<&waiting::Multiplier::four_times>(5).to_here(), 20);
      EXPECT_EQ(three.sync<&waiting::Multiplier::of>(5), 15);
      EXPECT_EQ(three.async<&waiting::Multiplier::of>(5).get(), 15);
      EXPECT_EQ(three.remote<&waiting::Multiplier::of>(5).to_here(), 15);
    }
  });
}

TEST_P(Waiting, WhenAllThrowsOneCallsError) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    std::vector<Future<int>> failing;
    std::vector<Future<int>> mixed;
    for (int i = 0; i < 10; ++i) {
      failing.push_back(agent.async<&waiting::throws>(to, i));
      mixed.push_back(agent.async<&waiting::plus>(to, i, i));
    }
    mixed.push_back(agent.async<&waiting::throws>(to, 77));
    EXPECT_EQ(error_of([&] { when_all(failing).get(); }).blame(), Blame::Remote);
    EXPECT_NE(error_of([&] { when_all(mixed).get(); }).text().find("number 77"), std::string::npos);
  });
}

TEST_P(Waiting, ContinuationHasItsOwnError) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    auto good = agent.async<&waiting::plus>(after(agent, 1), 1, 2);
    const auto derived = good.then([](int) -> int { throw std::invalid_argument("derived"); });
    EXPECT_THROW(derived.get(), std::invalid_argument);
    EXPECT_EQ(good.get(), 3) << "the parent keeps its value";
    EXPECT_EQ(error_of([&] { good.then(std::function<int(int)>()); }).blame(), Blame::Caller)
        << "a null continuation is refused";
    const auto seen = agent.async<&waiting::throws>(after(agent, 1), 5)
                          .then([](const Future<int>& parent) -> int {
                            EXPECT_EQ(error_of([&] { parent.get(); }).blame(), Blame::Remote);
                            throw std::range_error("another");
                          });
    EXPECT_THROW(seen.get(), std::range_error);
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Waiting, testing::ValuesIn(harness::settings()), harness::name_of);

// It blocks the only thread for tasks, on a future that does not belong to the agent.
TEST(WaitingLimits, ContinuationMayWaitForAnyFuture) {
  rpc::Options options;
  options.worker_threads = 1;
  run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const Promise<int> seen(nullptr);
        agent.async<&waiting::plus>(1, 1, 2).on_done([&agent, seen] {
          const auto other =
              Future<int>::ready(1).then([&](int) { return agent.async<&waiting::plus>(1, 2, 3); });
          seen.set(other.get());
        });
        EXPECT_EQ(seen.future().get(), 5);
      },
      options);
}

TEST(WaitingLimits, WaitAllThrowsTheTimeoutOfACall) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    std::unique_lock lock(waiting::held);
    const auto error = error_of([&] {
      rpc::wait_all([&] { agent.async<&waiting::after_release>(rpc::to(1).timeout(20ms), 1); });
    });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_EQ(rpc::wait_all([] {}), 0U) << "the call of the failed wait_all() is still tracked";
  });
}

TEST(WaitingLimits, DefaultLimitMayBeShortOrNone) {
  run_workers({As::Threads, "shm", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    std::vector<Future<int>> calls;
    Future<int> unlimited;
    {
      std::unique_lock lock(waiting::held);
      agent.set_timeout(1ms);
      for (int i = 0; i < 10; ++i) calls.push_back(agent.async<&waiting::after_release>(1, i));
      for (auto& call : calls) EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::Timeout);
      agent.set_timeout(0ms);
      unlimited = agent.async<&waiting::after_release>(1, 5);
      EXPECT_EQ(error_of([&] { unlimited.wait(20ms); }).blame(), Blame::Timeout)
          << "the call has no limit and is still under way";
    }
    EXPECT_EQ(unlimited.get(), 5);
    agent.set_timeout(60s);
  });
}

TEST(LookingInside, DebugInfoCountsWaitingAndRunning) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    EXPECT_EQ(agent.debug_info().calls_waiting, 0U);
    Future<int> waits;
    {
      std::unique_lock lock(waiting::held);
      waits = agent.async<&waiting::after_release>(agent.self(), 1);
      while (agent.debug_info().handlers_busy == 0) std::this_thread::yield();
      EXPECT_EQ(agent.debug_info().calls_waiting, 1U);
      EXPECT_EQ(agent.debug_info().handlers_busy, 1U);
    }
    EXPECT_EQ(waits.get(), 1);
    while (agent.debug_info().handlers_busy != 0) std::this_thread::yield();
    const auto now = agent.debug_info();
    EXPECT_EQ(now.calls_waiting + now.owner_rrefs + now.forks + now.pending_users, 0U);
    EXPECT_EQ(now.contexts + now.backward_passes, 0U);
  });
}

TEST(LookingInside, TransportIsReportedAndLoggedOnce) {
  std::mutex mutex;
  std::vector<std::string> chosen;
  const log::Capture capture([&](LogLevel, std::string_view line) {
    std::lock_guard lock(mutex);
    if (line.starts_with("worker0 (rank 0) reaches ")) chosen.emplace_back(line);
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto init = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank),
                     {.rank = rank, .world_size = 2, .store = store, .transports = {"tcp", "shm"}});
  };
  std::jthread other([&] { init(1).shutdown({.timeout = 30s}); });
  auto agent = init(0);
  EXPECT_EQ(agent.transport_to("worker1"), "") << "no worker has been called yet";
  for (int i = 0; i < 3; ++i) EXPECT_EQ(agent.sync<&waiting::after_release>(1, i), i);
  EXPECT_EQ(agent.transport_to("worker1"), "tcp") << "the first of the list that both workers have";
  EXPECT_EQ(agent.transport_to(agent.self()), "") << "calls to oneself use no transport";
  EXPECT_EQ(error_of([&] { static_cast<void>(agent.transport_to("nobody")); }).blame(),
            Blame::Caller);
  agent.shutdown({.timeout = 30s});
  EXPECT_EQ(error_of([&] { static_cast<void>(agent.transport_to("worker1")); }).blame(),
            Blame::Caller)
      << "this worker has left";
  other.join();
  std::lock_guard lock(mutex);
  ASSERT_EQ(chosen.size(), 1U);
  EXPECT_NE(chosen[0].find("by tcp ("), std::string::npos) << chosen[0];
}

}  // namespace
}  // namespace weft
