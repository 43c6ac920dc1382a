// A worker that is killed at an instant that nobody has chosen, while all use each other's references at random: the others
// go on, and nothing is counted once they have ended theirs.
#include <atomic>
#include <deque>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include <weft/tests/engine/rpc/refs.h>
#include <weft/tests/harness/killed_anywhen.h>

namespace anywhen {

using namespace weft;

int plus_held(RRef<int> a, int b) { return a.to_here() + b; }
std::atomic<int> come{0};
void comes() { ++come; }

}  // namespace anywhen

namespace weft {
namespace {

using harness::after;
using harness::Processes;
using namespace std::chrono_literals;

constexpr int kWorkers = 4;

bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = Deadline::in(20s);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

// One worker's part. A step that has to do with the killed worker may fail, and then says so; without a name, for whatever
// reason.
class Driver {
 public:
  Driver(rpc::Agent& agent, int seed, std::string victim)
      : agent_(agent), victim_(std::move(victim)), random_(static_cast<unsigned>(seed * kWorkers + agent.self().rank)) {}

  void step() {
    try {
      someones_step();
    } catch (const std::exception& failed) {
      ++failed_;
      EXPECT_NE(std::string(failed.what()).find(victim_), std::string::npos) << failed.what();
    }
  }
  void drop() { kept_.clear(); }
  int failed() const { return failed_; }

 private:
  int upto(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit + 1)); }
  rpc::WorkerInfo someone() { return after(agent_, upto(kWorkers - 1)); }
  void keep(RRef<int> reference) {
    kept_.push_back(std::move(reference));
    while (kept_.size() > 10) kept_.pop_front();
  }
  void someones_step() {
    const int value = upto(1000);
    switch (upto(5)) {
      case 0: keep(agent_.remote<&refs::number>(someone(), value)); break;
      case 1: {
        const auto third = someone();
        const auto made = agent_.sync<&refs::make_on>(someone(), third, value);
        keep(made);
        EXPECT_EQ(made.to_here(), value);
        break;
      }
      case 2:
        if (!kept_.empty()) keep(agent_.sync<&refs::give_back>(someone(), kept_.front()));
        break;
      case 3: {
        const RRef<int> mine(agent_, 1);
        const auto theirs = agent_.remote<&refs::number>(someone(), value);
        EXPECT_EQ(agent_.sync<&refs::fetch_sum>(someone(), theirs, mine), value + 1);
        break;
      }
      case 4: {
        RRef<int> chain = agent_.remote<&refs::number>(someone(), value);
        for (int i = 0; i < 4; ++i) {
          const auto next = someone();
          chain = agent_.remote<&anywhen::plus_held>(next, upto(1) == 0 ? chain : chain.copy_to(next), 1);
        }
        EXPECT_EQ(chain.to_here(), value + 4);
        break;
      }
      default: {
        const auto account = agent_.remote<refs::Account>(someone(), value);
        EXPECT_EQ(account.sync<&refs::Account::add>(2), value + 2);
      }
    }
  }

  rpc::Agent& agent_;
  const std::string victim_;
  std::mt19937 random_;
  std::deque<RRef<int>> kept_;
  int failed_ = 0;
};

class KilledAnywhen : public testing::TestWithParam<harness::KilledCase> {};

TEST_P(KilledAnywhen, LeavesTheOthersWorkingAndNothingCounted) {
  const auto& [transport, seed] = GetParam();
  const int victim = seed % kWorkers;
  Processes workers(kWorkers, [transport = transport, seed = seed, victim](int rank) {
    auto agent = rpc::init("worker" + std::to_string(rank),
                           {.rank = rank, .world_size = kWorkers, .timeout = 10s, .transports = {transport}});
    // Whoever hosts the store may be the one that is killed: all know each other before.
    for (int steps = 0; steps < kWorkers; ++steps) agent.sync<&refs::nothing>(after(agent, steps));
    Driver driver(agent, seed, "worker" + std::to_string(victim));
    Processes::say("ready");
    if (rank == victim) {
      for (;;) driver.step();
    }
    while (driver.failed() == 0) driver.step();  // as it must, where every fourth step asks the killed worker
    for (int i = 0; i < 20; ++i) driver.step();
    driver.drop();
    // No survivor ends before the others have done with it.
    const auto meet = [&agent, victim, rank](int times) {
      for (int other = 0; other < kWorkers; ++other) {
        if (other != victim && other != rank) agent.sync<&anywhen::comes>(other);
      }
      EXPECT_TRUE(comes_true([times] { return anywhen::come >= times * (kWorkers - 2); }));
    };
    meet(1);
    std::vector<std::size_t> counted;
    comes_true([&] {
      const auto now = agent.debug_info();
      counted = {now.owner_rrefs, now.forks, now.pending_users, now.calls_waiting, now.handlers_busy};
      return counted == std::vector<std::size_t>(5);
    });
    EXPECT_EQ(counted, std::vector<std::size_t>(5)) << "owners, forks, pending users, calls waiting, handlers busy";
    EXPECT_EQ(refs::living, 0) << "values";
    meet(2);
  });
  harness::kill_anywhen(workers, kWorkers, victim, seed, 100ms);
}

// The same, when all are about to end, or have begun to: nobody hangs. Whoever hears of it ends without the others, so they
// miss not the killed worker alone.
TEST_P(KilledAnywhen, EndsTheShutdownOfTheOthersAtOnce) {
  const auto& [transport, seed] = GetParam();
  const int victim = seed % kWorkers;
  Processes workers(kWorkers, [transport = transport, seed = seed](int rank) {
    auto agent = rpc::init("worker" + std::to_string(rank),
                           {.rank = rank, .world_size = kWorkers, .timeout = 10s, .transports = {transport}});
    for (int steps = 0; steps < kWorkers; ++steps) agent.sync<&refs::nothing>(after(agent, steps));
    Driver driver(agent, seed, "");
    Processes::say("ready");
    const auto end = Deadline::in(50ms);
    while (!end.passed()) driver.step();
    driver.drop();
    try {
      agent.shutdown({.timeout = 0ms});
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      EXPECT_NE(error.text().find("is lost, or has left without shutdown()"), std::string::npos) << error.text();
    }
  });
  harness::kill_anywhen(workers, kWorkers, victim, seed + 1, 100ms);
}

INSTANTIATE_TEST_SUITE_P(Rpc, KilledAnywhen, testing::Combine(testing::Values("shm", "tcp"), testing::Range(0, 8)),
                         harness::killed_name);

}  // namespace
}  // namespace weft
