// SPDX-License-Identifier: Apache-2.0
// The limit of the bytes of calls that are under way from one worker to another: a call beyond it
// waits.
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/call/in_flight.h>
#include <weft/engine/future/when_all.h>
#include <weft/tests/engine/rpc/workers.h>

namespace weighed {

using namespace weft;

// Calls that have arrived; they are answered by clear().
class Scales {
 public:
  Future<int> put(int weight) {
    std::lock_guard lock(mutex_);
    held_.emplace_back(weight, Promise<int>());
    return held_.back().second.future();
  }
  std::size_t count() const {
    std::lock_guard lock(mutex_);
    return held_.size();
  }
  void wait_for(std::size_t calls) const {
    while (count() < calls) std::this_thread::yield();  // ctest's time limit ends it
  }
  void clear() {
    std::vector<std::pair<int, Promise<int>>> held;
    {
      std::lock_guard lock(mutex_);
      held.swap(held_);
    }
    for (const auto& [weight, promise] : held) promise.set(weight);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<int, Promise<int>>> held_;
};
Scales scales;

Future<int> hold(at::Tensor tensor) { return scales.put(static_cast<int>(tensor.numel())); }
int weigh(at::Tensor tensor) { return static_cast<int>(tensor.numel()); }
int twice(int value) { return 2 * value; }
int back_and_forth(at::Tensor tensor, int hops) {
  if (hops == 0) return 0;
  return 1 + rpc::this_agent().sync<&back_and_forth>(rpc::this_call().caller, tensor, hops - 1);
}
// Makes calls of its own and answers in a continuation.
Future<int> hand_on(at::Tensor tensor, int times) {
  std::vector<Future<int>> calls;
  for (int i = 0; i < times; ++i)
    calls.push_back(rpc::this_agent().async<&weigh>(rpc::this_call().caller, tensor));
  return when_all(std::move(calls)).then([](const std::vector<int>& weights) {
    return static_cast<int>(weights.size());
  });
}

}  // namespace weighed

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_alone;

constexpr std::int64_t kMiB = 1 << 20;

at::Tensor mebibytes(int count) { return at::ones({count * kMiB}, at::kByte); }

// Runs workers 0 and 1 with a limit of `bytes`; worker 0 runs `body`.
void run_with(const std::string& transport, std::int64_t bytes,
              const std::function<void(rpc::Agent&)>& body) {
  run_alone({As::Threads, transport, 2}, [&](rpc::Options options) {
    options.bytes_in_flight = bytes;
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (*options.rank == 0) body(agent);
    agent.shutdown();
  });
}

void wait_until_held_back(const rpc::Agent& agent, std::size_t calls) {
  while (agent.debug_info().calls_held_back != calls) std::this_thread::yield();
}

class BytesInFlight : public testing::TestWithParam<std::string> {};

TEST_P(BytesInFlight, CallerWaitsAtTheLimit) {
  run_with(GetParam(), 4 * kMiB + kMiB / 2, [](rpc::Agent& agent) {
    std::vector<Future<int>> calls;
    std::thread program([&] {
      for (int i = 0; i < 12; ++i)
        calls.push_back(agent.async<&weighed::hold>("worker1", mebibytes(1)));
    });
    for (int round = 0; round < 3; ++round) {
      weighed::scales.wait_for(4);
      if (round < 2) wait_until_held_back(agent, 1);
      EXPECT_EQ(agent.sync<&weighed::twice>("worker1", 4), 8) << "a short call never waits";
      EXPECT_EQ(weighed::scales.count(), 4U);
      weighed::scales.clear();
    }
    program.join();
    for (const auto& call : calls) EXPECT_EQ(call.get(), kMiB);
    EXPECT_EQ(agent.debug_info().calls_held_back, 0U);
  });
}

TEST_P(BytesInFlight, CallAboveTheLimitGoesAlone) {
  run_with(GetParam(), kMiB, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&weighed::weigh>("worker1", mebibytes(3)), 3 * kMiB);
    auto first = agent.async<&weighed::hold>("worker1", mebibytes(1));
    int weight = 0;
    std::thread program([&] { weight = agent.sync<&weighed::weigh>("worker1", mebibytes(3)); });
    wait_until_held_back(agent, 1);
    EXPECT_FALSE(first.done());
    weighed::scales.wait_for(1);
    weighed::scales.clear();
    program.join();
    EXPECT_EQ(weight, 3 * kMiB);
    EXPECT_EQ(first.get(), kMiB);
  });
}

// If they were, each would wait for earlier calls, which wait for it.
TEST_P(BytesInFlight, NestedCallsAreNotHeldBack) {
  run_with(GetParam(), kMiB, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&weighed::back_and_forth>("worker1", mebibytes(1), 12), 12);
    EXPECT_EQ(agent.sync<&weighed::hand_on>("worker1", mebibytes(1), 8), 8);
    auto chained = agent.async<&weighed::weigh>("worker1", mebibytes(1)).then([&](int) {
      return agent.async<&weighed::weigh>("worker1", mebibytes(2));
    });
    EXPECT_EQ(chained.get(), 2 * kMiB);
  });
}

TEST_P(BytesInFlight, HeldCallTimesOutWithTheReason) {
  run_with(GetParam(), kMiB, [](rpc::Agent& agent) {
    auto first = agent.async<&weighed::hold>("worker1", mebibytes(1));
    const RRef<int> mine(agent, 4);
    const Error error = error_of([&] {
      agent.sync<&weighed::weigh>(rpc::to("worker1").timeout(std::chrono::milliseconds(50)),
                                  mebibytes(1));
    });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_NE(error.text().find("rpc::Options::bytes_in_flight (1048576)"), std::string::npos)
        << error.what();
    EXPECT_NE(error.text().find("could not be sent"), std::string::npos) << error.what();
    weighed::scales.wait_for(1);
    weighed::scales.clear();
    EXPECT_EQ(first.get(), kMiB);
    EXPECT_EQ(agent.sync<&weighed::weigh>("worker1", mebibytes(1)), kMiB);
  });
}

// The callee holds its bytes until then.
TEST_P(BytesInFlight, TimedOutCallCountsUntilAnswered) {
  run_with(GetParam(), kMiB, [](rpc::Agent& agent) {
    const auto to = rpc::to("worker1").timeout(std::chrono::milliseconds(50));
    EXPECT_EQ(error_of([&] { agent.sync<&weighed::hold>(to, mebibytes(1)); }).blame(),
              Blame::Timeout);
    int weight = 0;
    std::thread program([&] { weight = agent.sync<&weighed::weigh>("worker1", mebibytes(1)); });
    wait_until_held_back(agent, 1);
    weighed::scales.wait_for(1);
    weighed::scales.clear();
    program.join();
    EXPECT_EQ(weight, kMiB);
  });
}

TEST_P(BytesInFlight, HeldCallEndsWhenTheAgentLeaves) {
  run_alone({As::Threads, GetParam(), 2}, [&](rpc::Options options) {
    static std::promise<void> over;
    if (*options.rank == 0) over = {};
    options.bytes_in_flight = kMiB;
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (*options.rank == 1) return over.get_future().wait();
    auto first = agent.async<&weighed::hold>("worker1", mebibytes(1));
    weighed::scales.wait_for(1);
    std::thread program([&] {
      const Error error = error_of([&] { agent.sync<&weighed::weigh>("worker1", mebibytes(1)); });
      EXPECT_TRUE(error.blame() == Blame::Cancelled || error.blame() == Blame::Caller)
          << error.what();
    });
    wait_until_held_back(agent, 1);
    agent.leave();
    program.join();
    weighed::scales.clear();
    over.set_value();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, BytesInFlight, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

TEST(BytesInFlightByDefault, NegativeIsRefusedZeroIsUnlimited) {
  const auto store = [] { return c10::make_intrusive<c10d::HashStore>(); };
  const auto error = error_of([&] {
    rpc::init("worker0", {.rank = 0, .world_size = 1, .store = store(), .bytes_in_flight = -1});
  });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_NE(error.text().find("rpc::Options::bytes_in_flight is -1"), std::string::npos)
      << error.what();
  run_with("inproc", 0, [](rpc::Agent& agent) {
    std::vector<Future<int>> calls;
    for (int i = 0; i < 300; ++i)
      calls.push_back(agent.async<&weighed::hold>("worker1", mebibytes(1)));
    weighed::scales.wait_for(300);
    weighed::scales.clear();
    for (const auto& call : calls) EXPECT_EQ(call.get(), kMiB);
  });
}

// Calls that wait get their turns in the order in which they came.
TEST(BytesInFlightByTurns, SmallCallsDoNotOvertakeALargeOne) {
  std::vector<const void*> woken;
  call::BytesInFlight bytes(10, [&](const void* turn) { woken.push_back(turn); });
  using Turn = call::BytesInFlight::Turn;
  EXPECT_TRUE(bytes.take(6));
  Turn large{8}, small{2}, last{1};
  bytes.wait(large);
  EXPECT_FALSE(bytes.take(1)) << "it would overtake the large one";
  bytes.wait(small);
  bytes.wait(last);
  EXPECT_TRUE(woken.empty());
  bytes.give_back(6);
  EXPECT_EQ(woken, (std::vector<const void*>{&large, &small}));
  EXPECT_TRUE(large.has_room && small.has_room && !last.has_room);
  EXPECT_FALSE(bytes.give_up(large)) << "its turn has come already";
  EXPECT_TRUE(bytes.give_up(last));
  EXPECT_EQ(bytes.taken(), 10U);
}

TEST(BytesInFlightByTurns, GivingUpLetsLaterTurnsGoOn) {
  std::vector<const void*> woken;
  call::BytesInFlight bytes(10, [&](const void* turn) { woken.push_back(turn); });
  call::BytesInFlight::Turn large{20}, small{2};
  EXPECT_TRUE(bytes.take(6));
  bytes.wait(large);
  bytes.wait(small);
  EXPECT_TRUE(bytes.give_up(large));
  EXPECT_EQ(woken, std::vector<const void*>{&small});
}

}  // namespace
}  // namespace weft
