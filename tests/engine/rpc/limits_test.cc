// SPDX-License-Identifier: Apache-2.0
// The limits of the calls that one worker may have under way to another, and how an agent treats a
// peer that keeps to no limit.
#include <array>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/rref/control.h>
#include <weft/tests/engine/rpc/stranger.h>
#include <weft/tests/engine/rpc/workers.h>

namespace limited {

using namespace weft;

// Calls that are answered by open().
class Gate {
 public:
  Future<int> pass(int value) {
    std::lock_guard lock(mutex_);
    waiting_.emplace_back(value, Promise<int>());
    return waiting_.back().second.future();
  }
  void wait_for(std::size_t calls) {
    for (;;) {
      std::this_thread::yield();
      std::lock_guard lock(mutex_);
      if (waiting_.size() >= calls) return;
    }
  }
  void open() {
    std::vector<std::pair<int, Promise<int>>> passing;
    {
      std::lock_guard lock(mutex_);
      passing.swap(waiting_);
    }
    for (const auto& [value, promise] : passing) promise.set(value);
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int, Promise<int>>> waiting_;
};
Gate gate;

Future<int> held(int value) { return gate.pass(value); }
int plus(int a, int b) { return a + b; }
// Calls its caller, which has as many calls under way to this worker as it may.
int plus_there(int a, int b) {
  return rpc::this_agent().sync<&plus>(rpc::this_call().caller, a, b);
}
// The two workers call each other until no thread is left for the next call.
int ping(int hops) {
  rpc::this_agent().sync<&ping>(rpc::this_call().caller, hops + 1);
  return hops;
}
int owned() { return 4; }
int take(RRef<int> reference) { return reference.to_here(); }

}  // namespace limited

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_alone;
using harness::Setting;
using harness::Stranger;

// Runs workers 0 and 1 with the limits in `most`; worker 0 runs `body`.
void run_two(const std::string& transport, std::array<int, 2> most,
             const std::function<void(rpc::Agent&)>& body) {
  run_alone({As::Threads, transport, 2}, [&](rpc::Options options) {
    options.calls_in_flight = most.at(static_cast<std::size_t>(*options.rank));
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (*options.rank == 0) body(agent);
    agent.shutdown();
  });
}

void expect_busy(const Error& error, const std::string& text) {
  EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
  EXPECT_NE(error.text().find(text), std::string::npos) << error.what();
  EXPECT_NE(error.text().find("rpc::Options::calls_in_flight"), std::string::npos) << error.what();
}

class CallsInFlight : public testing::TestWithParam<std::string> {};

TEST_P(CallsInFlight, CallBeyondTheLimitFailsAtOnce) {
  run_two(GetParam(), {8, 8}, [](rpc::Agent& agent) {
    auto reference = agent.remote<&limited::owned>("worker1");
    EXPECT_EQ(reference.to_here(), 4);
    std::vector<Future<int>> calls;
    calls.push_back(agent.async<&limited::plus_there>("worker1", 1, 2));
    EXPECT_EQ(calls.back().get(), 3);
    for (int i = 1; i < 8; ++i) calls.push_back(agent.async<&limited::held>("worker1", i));
    limited::gate.wait_for(7);
    EXPECT_EQ(agent.sync<&limited::plus_there>("worker1", 1, 2), 3)
        << "the last allowed call, which calls back";
    calls.push_back(agent.async<&limited::held>("worker1", 8));
    expect_busy(error_of([&] { agent.sync<&limited::plus>("worker1", 1, 2); }),
                "8 calls to it are unanswered");
    expect_busy(error_of([&] { agent.sync_op("aten::neg", "worker1", at::ones(1)); }),
                "8 calls to it are unanswered");
    expect_busy(error_of([&] { agent.remote<&limited::owned>("worker1").created().get(); }),
                "8 calls to it are unanswered");
    EXPECT_EQ(agent.sync<&limited::plus>("worker0", 1, 2), 3) << "calls to oneself are not counted";
    // Weft's own messages, here the end of a reference, have no limit.
    reference = {};
    while (agent.debug_info().calls_waiting > 8) std::this_thread::yield();
    limited::gate.wait_for(8);
    limited::gate.open();
    for (std::size_t i = 1; i < calls.size(); ++i) EXPECT_EQ(calls[i].get(), static_cast<int>(i));
  });
}

class Nested : public testing::TestWithParam<std::string> {};

TEST_P(Nested, TooDeepCallsFailWithBusy) {
  run_two(GetParam(), {1000, 1000}, [](rpc::Agent& agent) {
    agent.shared_core()->thread_pool()->limit_blocked(8);  // the other worker keeps its high limit
    for (const int first : {1, 0}) {
      const Error error = error_of(
          [&] { agent.sync<&limited::ping>(rpc::to(first).timeout(std::chrono::seconds(40)), 0); });
      // The innermost call is refused; each outer function throws that error to its caller.
      EXPECT_NE(error.text().find("no more than 8 may"), std::string::npos) << error.what();
      EXPECT_NE(error.text().find("have the functions return a Future, or be coroutines"),
                std::string::npos)
          << error.what();
    }
    EXPECT_EQ(agent.sync<&limited::plus_there>("worker1", 1, 2), 3)
        << "both workers must still serve";
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Nested, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

// A call counts until its answer has arrived; a continuation of the answer may already call again.
TEST_P(CallsInFlight, CallsWithinTheLimitNeverFail) {
  run_two(GetParam(), {8, 8}, [](rpc::Agent& agent) {
    std::function<Future<int>(int)> chain = [&](int left) {
      auto call = agent.async<&limited::plus>("worker1", left, 0);
      return left == 0 ? call : call.then([&, left](int) { return chain(left - 1); });
    };
    std::vector<Future<int>> chains;
    for (int i = 0; i < 8; ++i) chains.push_back(chain(200));
    for (auto& one : chains) EXPECT_EQ(one.get(), 0);
    for (int round = 0; round < 100; ++round) {
      std::vector<RRef<int>> references;
      for (int i = 0; i < 8; ++i)
        references.push_back(agent.remote<&limited::plus>("worker1", i, 0));
      for (int i = 0; i < 8; ++i) references[static_cast<std::size_t>(i)].created().get();
      for (int i = 0; i < 8; ++i) EXPECT_EQ(references[static_cast<std::size_t>(i)].to_here(), i);
    }
  });
}

// The caller's limit is higher than the callee's. References in a refused call end.
TEST_P(CallsInFlight, CalleeEnforcesItsOwnLimit) {
  run_two(GetParam(), {100, 4}, [](rpc::Agent& agent) {
    std::vector<Future<int>> calls;
    for (int i = 0; i < 4; ++i) calls.push_back(agent.async<&limited::held>("worker1", i));
    const RRef<int> mine(agent, 4);
    for (int i = 0; i < 3; ++i)
      expect_busy(error_of([&] { agent.sync<&limited::take>("worker1", mine); }),
                  "it has 4 calls of worker0 (rank 0) to answer");
    EXPECT_EQ(agent.debug_info().forks, 0U);
    limited::gate.wait_for(4);
    limited::gate.open();
    for (int i = 0; i < 4; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i);
    EXPECT_EQ(agent.sync<&limited::take>("worker1", mine), 4);
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, CallsInFlight, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

TEST(CallsInFlightByDefault, CallsBeyondTheLimitFailWithBusy) {
  const int most = rpc::Options().calls_in_flight;
  run_two("shm", {most, most}, [&](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&limited::plus>("worker1", 1, 2), 3);
    std::vector<Future<int>> calls;
    for (int i = 0; i < 100'000; ++i)
      calls.push_back(
          agent.async<&limited::held>(rpc::to("worker1").timeout(std::chrono::milliseconds(0)), i));
    int busy = 0;
    for (const auto& call : calls) busy += call.done() ? 1 : 0;
    EXPECT_EQ(busy, 100'000 - most);
    limited::gate.wait_for(static_cast<std::size_t>(most));
    limited::gate.open();
    for (int i = 0; i < most; ++i) ASSERT_EQ(calls[static_cast<std::size_t>(i)].get(), i);
    EXPECT_EQ(agent.sync<&limited::plus>("worker1", 1, 2), 3);
  });
}

TEST(CallsInFlightByDefault, MustBeAtLeastOne) {
  for (const int most : {0, -1}) {
    const auto error = error_of([&] {
      rpc::init("worker0", {.rank = 0,
                            .world_size = 1,
                            .store = c10::make_intrusive<c10d::HashStore>(),
                            .calls_in_flight = most});
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("rpc::Options::calls_in_flight is " + std::to_string(most)),
              std::string::npos);
  }
}

// Calls from a peer that keeps to no limit.
class ForeignCalls : public testing::TestWithParam<std::string> {
 protected:
  rpc::Agent agent = rpc::init("worker0", {.rank = 0,
                                           .world_size = 1,
                                           .store = c10::make_intrusive<c10d::HashStore>(),
                                           .transports = {GetParam()},
                                           .calls_in_flight = 4});
};

TEST_P(ForeignCalls, LimitHoldsAcrossConnections) {
  Stranger first(agent, GetParam());
  first.greet(agent, 1);
  for (std::uint64_t call = 1; call <= 6; ++call)
    first.call<&limited::held>(call, rpc::MessageKind::Call, 3);
  for (const std::uint64_t call : {5, 6}) {
    const auto said = first.next();
    ASSERT_TRUE(said);
    EXPECT_EQ(said->head.kind, call::FrameKind::Failure);
    EXPECT_EQ(said->head.call, call);
    EXPECT_EQ(said->failure().what, static_cast<int>(call::Failure::Unread));
    EXPECT_EQ(said->failure().blame, static_cast<int>(Blame::Busy));
  }
  {
    Stranger second(agent, GetParam());
    second.greet(agent, 1);
    second.call<&limited::held>(1, rpc::MessageKind::Create, 3);
    const auto said = second.next();
    ASSERT_TRUE(said);
    EXPECT_EQ(said->head.kind, call::FrameKind::Failure);
  }
  first.call<&limited::plus>(7, rpc::MessageKind::Shutdown, 1, 2);
  const auto own = first.next();
  ASSERT_TRUE(own);
  EXPECT_EQ(own->head.kind, call::FrameKind::Reply);
  EXPECT_EQ(own->head.call, 7U);
  limited::gate.wait_for(4);
  limited::gate.open();
  for (int i = 0; i < 4; ++i) {
    const auto said = first.next();
    ASSERT_TRUE(said);
    EXPECT_EQ(said->head.kind, call::FrameKind::Reply);
  }
  first.call<&limited::plus>(8, rpc::MessageKind::Call, 1, 2);
  const auto more = first.next();
  ASSERT_TRUE(more);
  EXPECT_EQ(more->head.kind, call::FrameKind::Reply);
}

TEST_P(ForeignCalls, ReusedNumberEndsTheConnection) {
  {
    Stranger stranger(agent, GetParam());
    stranger.greet(agent, 1);
    for (int i = 0; i < 2; ++i) stranger.call<&limited::held>(1, rpc::MessageKind::Call, 3);
    EXPECT_TRUE(stranger.is_refused());
  }
  limited::gate.wait_for(1);  // otherwise the first call would wait there in the next test
  limited::gate.open();
}

TEST_P(ForeignCalls, UnreadAnswersEndTheConnection) {
  Stranger stranger(agent, GetParam(), Stranger::Reads::No);
  stranger.greet(agent, 1);
  int sent = 0;
  while (sent < 300'000) {
    const Op op = stranger.call<&limited::plus>(static_cast<std::uint64_t>(sent) + 1,
                                                rpc::MessageKind::Call);  // too few arguments
    if (!op.ended() || !op.error()) {
      ++sent;
    } else if (op.error()->blame() == Blame::Busy) {
      std::this_thread::yield();
    } else {
      break;
    }
  }
  std::size_t served = 0;
  for (int still = 0; still < 10;) {  // until the agent serves no more before an answer is read
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const std::size_t before = std::exchange(served, agent.debug_info().calls_served);
    still = before == served ? still + 1 : 0;
  }
  stranger.read();
  int answers = 0;
  while (stranger.next()) ++answers;
  EXPECT_TRUE(stranger.has_ended());
  EXPECT_LT(answers, sent);
}

// INT_MAX is how programs ask for no limit. More answers wait than a connection holds.
TEST(ForeignCallsWithoutLimit, AnswersMayBeReadVeryLate) {
  constexpr std::size_t kCalls = 70'000;
  rpc::Agent agent = rpc::init("worker0", {.rank = 0,
                                           .world_size = 1,
                                           .store = c10::make_intrusive<c10d::HashStore>(),
                                           .transports = {"inproc"},
                                           .calls_in_flight = std::numeric_limits<int>::max()});
  Stranger stranger(agent, "inproc", Stranger::Reads::No);
  stranger.greet(agent, 1);
  for (std::size_t sent = 0; sent < kCalls;) {
    const Op op =
        stranger.call<&limited::plus>(sent + 1, rpc::MessageKind::Call);  // too few arguments
    if (!op.ended() || !op.error()) {
      ++sent;
    } else {
      ASSERT_EQ(op.error()->blame(), Blame::Busy) << op.error()->what();
      std::this_thread::yield();
    }
  }
  const auto all_served = [&] { return agent.debug_info().calls_served >= kCalls; };
  ASSERT_TRUE(harness::comes_true(all_served, std::chrono::seconds(60)))
      << "the agent has ended the connection";
  stranger.read();
  std::size_t answers = 0;
  while (answers < kCalls && stranger.next()) ++answers;
  EXPECT_EQ(answers, kCalls);
}

// References with too few and too many fields: nothing is read beyond the bytes that came.
TEST_P(ForeignCalls, MalformedReferencesAreRefused) {
  Stranger stranger(agent, GetParam());
  stranger.greet(agent, 1);
  std::uint64_t call = 0;
  const auto refused = [&](const auto& reference) {
    stranger.call<&limited::take>(++call, rpc::MessageKind::Call, reference);
    const auto said = stranger.next();
    ASSERT_TRUE(said);
    EXPECT_EQ(said->head.kind, call::FrameKind::Failure);
    EXPECT_EQ(said->failure().blame, static_cast<int>(Blame::Caller)) << said->failure().text;
    EXPECT_NE(said->failure().text.find("cannot be decoded"), std::string::npos)
        << said->failure().text;
  };
  refused(std::optional<int>());
  for (std::size_t fields = 1; fields < 7; ++fields) refused(std::vector<int>(fields));
  refused(std::string("four"));
}

TEST_P(ForeignCalls, WrongArgumentCountIsRefused) {
  Stranger stranger(agent, GetParam());
  stranger.greet(agent, 1);
  const std::uint64_t id = std::uint64_t{1} << 48 | 1;
  stranger.create<&limited::plus>(1, id);
  stranger.create<&limited::plus>(2, id + 2, 1);
  stranger.create<&limited::plus>(3, id + 4, 1, 2, 3);
  stranger.create<&limited::plus>(4, id + 6, 1, 2);
  for (std::uint64_t call = 1; call <= 4; ++call) {
    const auto said = stranger.next();
    ASSERT_TRUE(said);
    EXPECT_EQ(said->head.call, call);
    EXPECT_EQ(said->head.kind, call == 4 ? call::FrameKind::Reply : call::FrameKind::Failure);
    if (call < 4) {
      EXPECT_EQ(said->failure().blame, static_cast<int>(Blame::Caller));
    }
  }
  EXPECT_EQ(agent.debug_info().owner_rrefs, 1U) << "refused creations leave nothing behind";
}

// A peer that does not say who it is uses a descriptor. It may do so for 10 s of real time; all of
// them wait at once here.
TEST(Strangers, SilentOnesAreDisconnected) {
  const std::vector<std::string> transports{"inproc", "shm", "tcp"};
  const auto alone = [&](const std::string& secret) {
    return rpc::init("worker0", {.rank = 0,
                                 .world_size = 1,
                                 .store = c10::make_intrusive<c10d::HashStore>(),
                                 .transports = transports,
                                 .secret = secret});
  };
  rpc::Agent agent = alone("");
  rpc::Agent guarded = alone("that no stranger knows");
  Stranger known(agent, "tcp");
  known.greet(agent, 1);
  Stranger challenger(guarded, "inproc");
  challenger.challenge(transport::make_nonce());
  ASSERT_TRUE(challenger.challenge_answered());
  std::deque<Stranger> silent;
  for (const auto& transport : transports) {
    silent.emplace_back(agent, transport);
    silent.emplace_back(guarded, transport);
  }
  for (auto& stranger : silent) EXPECT_TRUE(stranger.is_refused());
  EXPECT_TRUE(challenger.is_refused()) << "a peer that proves nothing is refused as well";
  known.call<&limited::plus>(1, rpc::MessageKind::Call, 1, 2);
  const auto said = known.next();
  ASSERT_TRUE(said) << "a peer that has said who it is may stay silent";
  EXPECT_EQ(said->head.kind, call::FrameKind::Reply);
}

// No worker can have these ranks.
TEST_P(ForeignCalls, ImpossibleRanksAreRefused) {
  for (const int rank : {-1, 65536, 1 << 20}) {
    Stranger stranger(agent, GetParam());
    stranger.greet(agent, rank);
    EXPECT_TRUE(stranger.is_refused()) << rank;
  }
}

// A worker that wants a name which is taken asks whether the holder lives. It gets that answer, and
// any further message is refused.
TEST_P(ForeignCalls, LivenessProbeMayAskNothingElse) {
  Stranger stranger(agent, GetParam());
  stranger.greet(agent, call::kProbesOnly);
  const auto said = stranger.next();
  ASSERT_TRUE(said);
  EXPECT_EQ(said->head.kind, call::FrameKind::Reply);
  EXPECT_EQ(said->head.call, 1U);
  stranger.call<&rpc::internal::alive>(2, rpc::MessageKind::Shutdown);
  EXPECT_TRUE(stranger.is_refused());
  EXPECT_EQ(agent.debug_info().calls_served, 0U);
}

INSTANTIATE_TEST_SUITE_P(Rpc, ForeignCalls, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
