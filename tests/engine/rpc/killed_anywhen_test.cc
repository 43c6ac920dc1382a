// SPDX-License-Identifier: Apache-2.0
// A worker is killed at a random time, while all use each other's references at random: the others
// go on, and nothing is counted once they have dropped their references.
#include <gtest/gtest.h>

#include <weft/tests/engine/rpc/random_user.h>
#include <weft/tests/harness/killed_anywhen.h>

namespace weft {
namespace {

using harness::after;
using harness::comes_true;
using harness::Processes;
using harness::RandomUser;
using namespace std::chrono_literals;

constexpr int kWorkers = 4;

class KilledAnywhen : public testing::TestWithParam<harness::KilledCase> {};

TEST_P(KilledAnywhen, OthersGoOnAndNothingIsCounted) {
  const auto& [transport, seed] = GetParam();
  const int victim = seed % kWorkers;
  Processes workers(kWorkers, [transport, seed, victim](int rank) {
    auto agent = rpc::init(
        "worker" + std::to_string(rank),
        {.rank = rank, .world_size = kWorkers, .timeout = 10s, .transports = {transport}});
    // The victim may host the store, so all workers look each other up before.
    for (int steps = 0; steps < kWorkers; ++steps) agent.sync<&refs::nothing>(after(agent, steps));
    // A step may fail only with an error that names the killed worker.
    const auto names_victim = [name = "worker" + std::to_string(victim)](const Error& failed) {
      return failed.text().find(name) != std::string::npos;
    };
    RandomUser user(agent, kWorkers, seed * kWorkers + rank, names_victim);
    Processes::say("ready");
    if (rank == victim) {
      for (;;) user.step();
    }
    while (user.failed() == 0) user.step();  // a step soon asks the killed worker
    for (int i = 0; i < 20; ++i) user.step();
    user.drop();
    // No survivor leaves while the others still use it.
    harness::meet_without(agent, victim);
    std::vector<std::size_t> counted;
    comes_true([&] {
      const auto now = agent.debug_info();
      counted = {now.owner_rrefs, now.forks, now.pending_users, now.calls_waiting,
                 now.handlers_busy};
      return counted == std::vector<std::size_t>(5);
    });
    EXPECT_EQ(counted, std::vector<std::size_t>(5))
        << "owner_rrefs, forks, pending_users, calls_waiting, handlers_busy";
    EXPECT_EQ(refs::living, 0) << "values that still live";
    harness::meet_without(agent, victim);
  });
  harness::kill_anywhen(workers, kWorkers, victim, seed, 100ms);
}

// The same while all are about to shut down or have begun to: nobody hangs. A survivor whose
// shutdown() fails leaves at once, so the others may also miss it and not only the killed worker.
TEST_P(KilledAnywhen, OthersShutdownEndsAtOnce) {
  const auto& [transport, seed] = GetParam();
  const int victim = seed % kWorkers;
  Processes workers(kWorkers, [transport, seed](int rank) {
    auto agent = rpc::init(
        "worker" + std::to_string(rank),
        {.rank = rank, .world_size = kWorkers, .timeout = 10s, .transports = {transport}});
    for (int steps = 0; steps < kWorkers; ++steps) agent.sync<&refs::nothing>(after(agent, steps));
    RandomUser user(agent, kWorkers, seed * kWorkers + rank, [](const Error&) { return true; });
    Processes::say("ready");
    const auto end = Deadline::in(50ms);
    while (!end.passed()) user.step();
    user.drop();
    try {
      agent.shutdown({.timeout = 0ms});
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      EXPECT_NE(error.text().find("is lost, or has left without shutdown()"), std::string::npos)
          << error.text();
    }
  });
  harness::kill_anywhen(workers, kWorkers, victim, seed + 1, 100ms);
}

// Workers are stopped for a while, again and again; none is taken for lost.
class StoppedAnywhen : public testing::TestWithParam<harness::KilledCase> {};

TEST_P(StoppedAnywhen, OnlyDelaysTheOthers) {
  const auto& [transport, seed] = GetParam();
  Processes workers(kWorkers, [transport, seed](int rank) {
    auto agent = rpc::init(
        "worker" + std::to_string(rank),
        {.rank = rank, .world_size = kWorkers, .timeout = 20s, .transports = {transport}});
    Processes::say("ready");
    {
      RandomUser user(agent, kWorkers, seed * kWorkers + rank, [](const Error&) { return false; });
      const auto end = Deadline::in(2s);
      while (!end.passed()) user.step();
    }
    agent.shutdown({.timeout = 20s});
    EXPECT_EQ(refs::living, 0) << "values that still live";
  });
  for (int rank = 0; rank < kWorkers; ++rank) workers.wait_for(rank, "ready");
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int times = 0; times < 10; ++times) {
    const int rank = static_cast<int>(random() % kWorkers);
    workers.signal(rank, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 300));
    workers.signal(rank, SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
  }
  workers.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Rpc, StoppedAnywhen,
                         testing::Combine(testing::Values("shm", "tcp"), testing::Range(0, 3)),
                         harness::killed_name);
INSTANTIATE_TEST_SUITE_P(Rpc, KilledAnywhen,
                         testing::Combine(testing::Values("shm", "tcp"), testing::Range(0, 8)),
                         harness::killed_name);

}  // namespace
}  // namespace weft
