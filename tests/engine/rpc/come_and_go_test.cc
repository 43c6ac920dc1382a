// SPDX-License-Identifier: Apache-2.0
// Workers of an open job join and leave all the time, while all use each other's references at
// random: calls succeed or name the worker that is missing, nothing hangs, and nothing is left.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/tests/engine/rpc/random_user.h>

namespace come_and_go {

std::atomic<int> gone{0};
void goes() { ++gone; }

}  // namespace come_and_go

namespace weft {
namespace {

using harness::As;
using harness::comes_true;
using harness::Processes;
using harness::RandomUser;
using namespace std::chrono_literals;

constexpr int kWorkers = 4;
constexpr int kLives = 12;

// True for errors caused by a worker that leaves, has left or has not joined. Errors of another
// worker's function or of a creation may have more text.
bool is_of_leaving(const Error& error) {
  const auto says = [text = error.text()](const std::string& words) {
    return text.find(words) != std::string::npos;
  };
  switch (error.blame()) {
    case Blame::PeerLost: return says("worker") || says("rank");
    case Blame::Caller: return says("cannot be found");
    case Blame::Remote: return says("worker") || says("rank");
    case Blame::Cancelled: return says("was not created");  // the call that creates it was lost
    default: return false;
  }
}

// Joins and leaves `lives` times, in a way chosen at random.
void live(const rpc::Options& options, int lives, int seed) {
  const int rank = *options.rank;
  std::mt19937 random(static_cast<unsigned>(seed * kWorkers + rank));
  for (int generation = 0; generation < lives; ++generation) {
    auto agent = rpc::init("worker" + std::to_string(rank), options);
    {
      RandomUser user(agent, kWorkers, static_cast<int>(random()), is_of_leaving);
      for (auto steps = random() % 40; steps > 0; --steps) user.step();
    }
    if (generation == lives - 1) agent.sync<&come_and_go::goes>(0);
    switch (random() % 3) {
      case 0: agent.shutdown({.timeout = 20s}); break;
      case 1: agent.leave(); break;
      default: agent = {};
    }
  }
}

// Hosts the store, uses the others' references, and ends after all others.
void stay(const rpc::Options& options, int seed) {
  auto agent = rpc::init("worker0", options);
  {
    RandomUser user(agent, kWorkers, seed * kWorkers, is_of_leaving);
    while (come_and_go::gone < kWorkers - 1) user.step();
  }
  std::vector<std::size_t> counted;
  comes_true([&] {
    const auto now = agent.debug_info();
    counted = {now.owner_rrefs, now.forks, now.pending_users, now.calls_waiting, now.handlers_busy};
    return counted == std::vector<std::size_t>(5);
  });
  EXPECT_EQ(counted, std::vector<std::size_t>(5))
      << "owner_rrefs, forks, pending_users, calls_waiting, handlers_busy";
  EXPECT_TRUE(comes_true([&] { return agent.workers().size() == 1; }))
      << "a worker that has left is still listed";
  agent.shutdown();
}

class ComeAndGo : public testing::TestWithParam<std::tuple<harness::Setting, int>> {};

TEST_P(ComeAndGo, CallsSucceedOrNameWhoIsMissing) {
  const auto& [setting, seed] = GetParam();
  const auto body = [&transport = setting.transport, seed](
                        int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    const rpc::Options options{
        .rank = rank, .store = store, .timeout = 10s, .transports = {transport}};
    rank == 0 ? stay(options, seed) : live(options, kLives, seed);
  };
  come_and_go::gone = 0;
  if (setting.as == As::Threads) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(kWorkers, [&](int rank) { body(rank, store); });
  } else {
    Processes workers(kWorkers, [&](int rank) {
      ::unsetenv("WORLD_SIZE");
      body(rank, {});
      EXPECT_EQ(refs::living, 0) << "values that still live";
    });
    workers.expect_success();
  }
  EXPECT_EQ(refs::living, 0) << "values that still live";
}

// Joins, by name and rank, the job whose store this is.
rpc::Agent come(const std::string& name, int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  return rpc::init(name, {.rank = rank, .store = store, .timeout = 20s, .transports = {"inproc"}});
}

TEST(Successor, OwnsNothingOfItsPredecessor) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto first = come("first", 0, store), third = come("third", 2, store);
  const auto reaches_rank_1 = [&] {  // this call may meet the end of the predecessor's connection
    try {
      return first.sync<&refs::number>(1, 6) == 6;
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
      return false;
    }
  };
  for (const bool has_other_name : {false, true}) {
    auto owner = come("owner", 1, store);
    EXPECT_TRUE(comes_true(reaches_rank_1));
    const rpc::WorkerInfo info = first.worker("owner");
    const auto value = first.remote<&refs::number>(info, 4);
    EXPECT_EQ(value.to_here(), 4);
    EXPECT_EQ(third.sync<&refs::number>("owner", 5), 5)
        << "the third worker knows the owner as well";
    owner.leave();
    auto successor = come(has_other_name ? "another" : "owner", 1, store);
    EXPECT_EQ(successor.sync<&refs::number>("first", 1) + successor.sync<&refs::number>("third", 1),
              2);
    EXPECT_TRUE(comes_true(reaches_rank_1));
    std::vector<std::function<void()>> uses{
        [&] { value.to_here(); },
        [&] { value.sync<&refs::plus_number>(1); },
        [&] { first.sync<&refs::plus_held>("third", value, 1); },
        [&] { first.sync<&refs::plus_held>(1, value, 1); },
        [&] { value.copy_to("third").to_here(); },
    };
    for (std::size_t use = 0; use < uses.size(); ++use) {
      const auto error = harness::error_of(uses[use]);
      EXPECT_EQ(error.blame(), Blame::PeerLost) << use << ": " << error.text();
      EXPECT_NE(error.text().find("has left"), std::string::npos) << use << ": " << error.text();
    }
    if (has_other_name) {  // otherwise the names are the same
      struct Named {
        rpc::WorkerInfo who;
        Blame blame;
        std::string text;
      };
      for (const Named& named :
           {Named{info, Blame::PeerLost, "owner (rank 1) has left"},
            Named{{"nobody", 1}, Blame::Caller, "nobody (rank 1) cannot be found"}}) {
        const std::vector<std::function<void()>> names{
            [&] { first.sync<&refs::number>(named.who, 1); }, [&] { first.worker(named.who); }};
        for (const auto& name : names) {
          const auto error = harness::error_of(name);
          EXPECT_EQ(error.blame(), named.blame) << error.text();
          EXPECT_NE(error.text().find(named.text), std::string::npos) << error.text();
        }
      }
    }
    EXPECT_EQ(successor.debug_info().owner_rrefs, 0U);
    successor.leave();
  }
  third.leave();
  first.leave();
}

// The successor answers calls under its predecessor's rank, but holds none of its references.
TEST(Successor, EndsItsPredecessorsReferences) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto owner = come("owner", 0, store);
  auto user = come("user", 1, store);
  RRef<int> kept = user.remote<&refs::number>("owner", 4);
  EXPECT_EQ(kept.to_here(), 4);
  EXPECT_EQ(owner.debug_info().forks, 1U);
  user.leave();
  auto successor = come("user", 1, store);
  EXPECT_EQ(successor.sync<&refs::number>("owner", 1), 1);
  EXPECT_EQ(owner.debug_info().owner_rrefs, 0U)
      << "they end before the first call of the successor is answered";
  const auto next = successor.remote<&refs::number>("owner", 5);
  EXPECT_EQ(next.to_here(), 5);
  EXPECT_EQ(owner.debug_info().forks, 1U);
  successor.leave();
  owner.leave();
}

INSTANTIATE_TEST_SUITE_P(
    Rpc, ComeAndGo,
    testing::Combine(testing::Values(harness::Setting{As::Threads, "inproc", kWorkers},
                                     harness::Setting{As::Threads, "shm", kWorkers},
                                     harness::Setting{As::Threads, "tcp", kWorkers},
                                     harness::Setting{As::Processes, "shm", kWorkers},
                                     harness::Setting{As::Processes, "tcp", kWorkers}),
                     testing::Range(0, 2)),
    [](const auto& one) {
      return name(std::get<0>(one.param)) + "Seed" + std::to_string(std::get<1>(one.param));
    });

}  // namespace
}  // namespace weft
