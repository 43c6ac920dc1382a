// SPDX-License-Identifier: Apache-2.0
// A long run of calls: several workers call each other at random, in all modes, with errors, time
// limits, references that travel and control messages that are refused; afterwards no counter is
// above zero and no memory is kept. It takes WEFT_SOAK_SECONDS, 3 by default; `./dev soak rpc` runs
// it for two minutes.
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/engine/future/when_all.h>
#include <weft/tests/engine/rpc/refs.h>
#include <weft/tests/harness/leftovers.h>

namespace soak {

using namespace weft;

int plus(int a, int b) { return a + b; }
std::vector<at::Tensor> doubled(std::vector<at::Tensor> tensors) {
  for (auto& tensor : tensors) tensor = tensor * 2;
  return tensors;
}
int relay(int hops, int step) {
  auto& agent = rpc::this_agent();
  if (hops == 0) return agent.self().rank;
  return agent.sync<&relay>(harness::after(agent, step), hops - 1, step);
}
Future<int> relay_later(int hops, int step) {
  auto& agent = rpc::this_agent();
  if (hops == 0) co_return 0;
  co_return 1 + co_await agent.async<&relay_later>(harness::after(agent, step), hops - 1, step);
}
int until_cancelled() {
  while (!rpc::this_call().cancelled) std::this_thread::yield();
  return 0;
}
int plus_held(RRef<int> a, int b) { return a.to_here() + b; }

}  // namespace soak

namespace weft {
namespace {

using harness::after;
using harness::As;
using harness::error_of;
using harness::live_bytes;
using namespace std::chrono_literals;

std::chrono::milliseconds duration() {
  const char* const given = std::getenv("WEFT_SOAK_SECONDS");
  return std::chrono::seconds(given == nullptr ? 3 : std::atoi(given));
}

// One worker's part: each step makes a random kind of call and checks its result.
class Driver {
 public:
  explicit Driver(rpc::Agent& agent)
      : agent_(agent), random_(static_cast<unsigned>(agent.self().rank)) {}

  void run_until(Deadline end) {
    while (!end.passed()) {
      step();
      ++steps_;
    }
    kept_.clear();
  }
  std::uint64_t steps() const { return steps_; }
  std::uint64_t references() const { return references_; }

 private:
  int upto(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit + 1)); }
  rpc::WorkerInfo someone() {
    return after(agent_, upto(static_cast<int>(agent_.workers().size()) - 1));
  }
  int hops() const { return static_cast<int>(agent_.workers().size()); }

  void step() {
    const int a = upto(1000);
    const auto to = someone();
    switch (upto(11)) {
      case 0: EXPECT_EQ(agent_.sync<&soak::plus>(to, a, 1), a + 1); break;
      case 1: EXPECT_EQ(agent_.sync<rpc::inline_<&soak::plus>>(to, a, 2), a + 2); break;
      case 2: many(to); break;
      case 3: EXPECT_EQ(agent_.sync<&soak::relay>(to, hops(), 1), to.rank); break;
      case 4: EXPECT_EQ(agent_.sync<&soak::relay_later>(to, 2 * hops(), 1), 2 * hops()); break;
      case 5:
        EXPECT_EQ(error_of([&] { agent_.sync<&refs::throws>(to, "on purpose"); }).blame(),
                  Blame::Remote);
        break;
      case 6: cancelled(to); break;
      case 7: kept(to, a); break;
      case 8: account(to, a); break;
      case 9: chain(a); break;
      case 10: tensors(to); break;
      default: failed_creation(to); break;
    }
  }
  void many(const rpc::WorkerInfo& to) {
    std::vector<Future<int>> calls;
    for (int i = 0; i < 16; ++i) calls.push_back(agent_.async<&soak::plus>(to, i, i));
    const auto sums = when_all(calls).get();
    for (int i = 0; i < 16; ++i) EXPECT_EQ(sums[static_cast<std::size_t>(i)], 2 * i);
  }
  void tensors(const rpc::WorkerInfo& to) {
    const std::int64_t size = upto(9) == 0 ? 64 << 10 : upto(500);
    const auto got = agent_.sync<&soak::doubled>(
        to, std::vector<at::Tensor>{at::ones({size}), at::eye(3).to_sparse()});
    EXPECT_EQ(got.at(0).sum().item<double>(), 2.0 * static_cast<double>(size));
    EXPECT_EQ(got.at(1).to_dense().sum().item<double>(), 6.0);
  }
  void cancelled(const rpc::WorkerInfo& to) {
    const auto error =
        error_of([&] { agent_.sync<&soak::until_cancelled>(rpc::to(to).timeout(2ms)); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
  }
  void kept(const rpc::WorkerInfo& to, int value) {
    kept_.push_back(agent_.remote<&refs::number>(to, value));
    const RRef<int> mine(agent_, 1);
    EXPECT_EQ(agent_.sync<&refs::fetch_sum>(someone(), kept_.back(), mine), value + 1);
    kept_.push_back(agent_.sync<&refs::give_back>(someone(), kept_.front()));
    kept_.push_back(agent_.sync<&refs::make_on>(someone(), someone(), value));
    EXPECT_EQ(kept_.back().to_here(), value);
    references_ += 8;
    while (kept_.size() > 10) kept_.pop_front();
  }
  void account(const rpc::WorkerInfo& to, int start) {
    const auto account = agent_.remote<refs::Account>(to, start);
    EXPECT_EQ(account.sync<&refs::Account::add>(2), start + 2);
    EXPECT_EQ(account.async<&refs::Account::add_later>(3).get(), start + 5);
    EXPECT_EQ(error_of([&] { account.sync<&refs::Account::fail>(); }).blame(), Blame::Remote);
    ++references_;
  }
  void chain(int start) {
    RRef<int> value = agent_.remote<&refs::number>(someone(), start);
    for (int i = 0; i < 5; ++i) {
      const auto next = someone();
      value = agent_.remote<&soak::plus_held>(next, upto(1) == 0 ? value : value.copy_to(next), 1);
    }
    EXPECT_EQ(value.to_here(), start + 5);
    references_ += 17;
  }
  void failed_creation(const rpc::WorkerInfo& to) {
    const auto broken = agent_.remote<&refs::throws>(to, "on purpose");
    EXPECT_THROW(broken.copy_to(someone()).to_here(), rpc::CreationError);
    EXPECT_THROW(broken.to_here(), rpc::CreationError);
    references_ += 2;
  }

  rpc::Agent& agent_;
  std::mt19937 random_;
  std::deque<RRef<int>> kept_;
  std::uint64_t steps_ = 0;
  std::uint64_t references_ = 0;
};

// The sum of all counters of a worker but calls_served.
std::size_t counted(const rpc::DebugInfo& info) {
  return info.owner_rrefs + info.forks + info.pending_users + info.contexts + info.backward_passes +
         info.calls_waiting + info.handlers_busy;
}

class RpcSoak : public testing::TestWithParam<std::string> {};

TEST_P(RpcSoak, RandomCallsLeaveNothingBehind) {
  constexpr int kWorkers = 4;
  const auto part = duration() / 4;
  std::barrier together(kWorkers);
  std::atomic<std::uint64_t> steps{0};
  std::atomic<std::uint64_t> references{0};
  std::size_t before = 0;
  std::size_t behind = 0;
  harness::run_workers(
      {As::Threads, GetParam(), kWorkers},
      [&](rpc::Agent& agent) {
        if (agent.self().rank == 0)
          ::alarm(static_cast<unsigned>(
              std::chrono::duration_cast<std::chrono::seconds>(duration() + 60s).count()));
        Driver driver(agent);
        const auto settle = [&] {
          together.arrive_and_wait();
          const Deadline limit = Deadline::in(20s);
          while (counted(agent.debug_info()) > 0 && !limit.passed()) std::this_thread::yield();
          EXPECT_EQ(counted(agent.debug_info()), 0U) << agent.self().name;
          together.arrive_and_wait();
        };
        driver.run_until(Deadline::in(part));  // until pools and threads have grown to their size
        settle();
        const auto first = driver.references();
        if (agent.self().rank == 0) before = live_bytes();
        together.arrive_and_wait();
        driver.run_until(Deadline::in(3 * part));
        settle();
        if (agent.self().rank == 0) behind = live_bytes();
        together.arrive_and_wait();
        steps += driver.steps();
        references += driver.references() - first;
      },
      {.worker_threads = 4,
       .faults = {.fail_first = {{rpc::MessageKind::Fork, 5},
                                 {rpc::MessageKind::ChildAccept, 5},
                                 {rpc::MessageKind::UserDelete, 5}}}});
  EXPECT_EQ(refs::living, 0);
  EXPECT_GT(steps, 100U);
  // An owner remembers the forks that ended within the last minute, at some 60 bytes each.
  const std::uint64_t remembered = references * 100;
  EXPECT_LE(behind, before + (2 << 20) + remembered)
      << steps << " steps, " << references << " references";
  RecordProperty("steps", std::to_string(steps));
}

INSTANTIATE_TEST_SUITE_P(Rpc, RpcSoak, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
