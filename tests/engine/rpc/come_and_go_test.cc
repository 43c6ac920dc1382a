// Workers of a job without a world size that come and go all the time, while all use each other's references at random: calls
// give what they should or say who is not there, nothing hangs, nothing stays.
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

// Where the other side leaves, has left or has not come.
bool is_of_leaving(const Error& error) {
  const auto says = [text = error.text()](const std::string& words) { return text.find(words) != std::string::npos; };
  const bool is_not_there = says("cannot be found") || says("is not initialized any more");
  switch (error.blame()) {
    case Blame::PeerLost: return says("worker") || says("rank");
    case Blame::Caller: return is_not_there;
    case Blame::Remote: return is_not_there || says("connection");
    case Blame::Cancelled: return says("gave it up") || says("was given up");  // the call that was to make a value was lost
    default: return false;
  }
}

// Comes and goes, by each way to go.
void live(const rpc::Options& options, int lives, int seed) {
  const int rank = *options.rank;
  std::mt19937 random(static_cast<unsigned>(seed * kWorkers + rank));
  for (int life = 0; life < lives; ++life) {
    auto agent = rpc::init("worker" + std::to_string(rank), options);
    {
      RandomUser user(agent, kWorkers, static_cast<int>(random()), is_of_leaving);
      for (auto steps = random() % 40; steps > 0; --steps) user.step();
    }
    if (life == lives - 1) agent.sync<&come_and_go::goes>(0);
    switch (random() % 3) {
      case 0: agent.shutdown({.timeout = 20s}); break;
      case 1: agent.leave(); break;
      default: agent = {};
    }
  }
}

// Hosts what the others meet at, uses them, and ends after all.
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
  EXPECT_EQ(counted, std::vector<std::size_t>(5)) << "owners, forks, pending users, calls waiting, handlers busy";
  EXPECT_TRUE(comes_true([&] { return agent.workers().size() == 1; })) << "who has left is not there";
  agent.shutdown();
}

class ComeAndGo : public testing::TestWithParam<std::tuple<std::string, As, int>> {};

TEST_P(ComeAndGo, CallsEndWellOrSayWhoIsNotThereAndNothingStays) {
  const auto& [transport, as, seed] = GetParam();
  const auto body = [transport = transport, seed = seed](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    const rpc::Options options{.rank = rank, .store = store, .timeout = 10s, .transports = {transport}};
    rank == 0 ? stay(options, seed) : live(options, kLives, seed);
  };
  if (as == As::Threads) {
    come_and_go::gone = 0;
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(kWorkers, [&](int rank) { body(rank, store); });
  } else {
    Processes workers(kWorkers, [&](int rank) {
      ::unsetenv("WORLD_SIZE");
      body(rank, {});
      EXPECT_EQ(refs::living, 0) << "values";
    });
    workers.expect_success();
  }
  EXPECT_EQ(refs::living, 0) << "values";
}

INSTANTIATE_TEST_SUITE_P(Rpc, ComeAndGo,
                         testing::Combine(testing::Values("inproc", "shm", "tcp"), testing::Values(As::Threads),
                                          testing::Range(0, 2)),
                         [](const auto& one) {
                           return std::get<0>(one.param) + name(std::get<1>(one.param)) + "Seed" +
                                  std::to_string(std::get<2>(one.param));
                         });

}  // namespace
}  // namespace weft
