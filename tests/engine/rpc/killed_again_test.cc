// SPDX-License-Identifier: Apache-2.0
// Workers that are killed and started again under their names, as processes: the others reach the
// new ones, and nothing of the old ones is left.
#include <condition_variable>
#include <csignal>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>

#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/engine/launch/process.h>
#include <weft/tests/engine/rpc/random_user.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/leftovers.h>

namespace killed_again {

using namespace weft;

std::mutex mutex;
std::condition_variable changed;
struct Met {
  int number;
  RRef<int> theirs;
};
std::deque<Met> met;
bool is_over = false;
std::atomic<int> number{0};  // the generation of this process
std::atomic<int> touched{0};

// An actor tells the learner that it has joined; each gets a reference to a value of the other.
RRef<int> meet(int which, RRef<int> theirs) {
  std::lock_guard lock(mutex);
  met.push_back({which, std::move(theirs)});
  changed.notify_all();
  return RRef<int>(which);
}
int which() { return number; }
int touch() { return ++touched; }
int touches() { return touched; }
int plus_one(RRef<int> value) { return value.to_here() + 1; }
void end() {
  std::lock_guard lock(mutex);
  is_over = true;
  changed.notify_all();
}
void wait_for_end() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return is_over; });
}
Met next_met() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return !met.empty(); });
  Met one = std::move(met.front());
  met.pop_front();
  return one;
}

}  // namespace killed_again

namespace weft {
namespace {

using harness::comes_true;
using harness::error_of;
using harness::Processes;
using harness::RandomUser;
using namespace std::chrono_literals;

// A job whose processes the test starts and kills one by one.
class Job {
 public:
  explicit Job(std::string transport)
      : transport_(std::move(transport)),
        address_("tcp://127.0.0.1:" + std::to_string(launch::free_port())) {}
  rpc::Options options(std::optional<int> rank = std::nullopt) const {
    return {.rank = rank, .init_method = address_, .timeout = 30s, .transports = {transport_}};
  }
  std::unique_ptr<Processes> start(const std::function<void()>& body) const {
    return std::make_unique<Processes>(1, [&](int) {
      for (const char* variable : {"RANK", "WORLD_SIZE"}) ::unsetenv(variable);
      body();
    });
  }
  // Starts an actor that waits until end() is called, or it is killed.
  std::unique_ptr<Processes> actor(int number, const std::string& name = "actor") const {
    return start([this, number, name] {
      killed_again::number = number;
      auto agent = rpc::init(name, options());
      const RRef<int> own(agent, number);
      const auto theirs = agent.sync<&killed_again::meet>("learner", number, own);
      Processes::say("met");
      killed_again::wait_for_end();
      agent.shutdown({.timeout = 20s});
    });
  }

 private:
  const std::string transport_;
  const std::string address_;
};

std::ptrdiff_t threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator());
}

class KilledAgain : public testing::TestWithParam<std::string> {};

TEST_P(KilledAgain, ManyDeathsLeaveNothingBehind) {
  const int lives = harness::runs_all_settings() ? 51 : 21;
  const Job job(GetParam());
  const auto learner = job.start([&] {
    auto agent = rpc::init("learner", job.options(0));
    std::atomic<int> lost{0}, joined{0}, misplaced{0};
    agent.on_worker_lost([&](const rpc::WorkerInfo& worker, const Error& why) {
      if (worker.name != "actor" || why.blame() != Blame::PeerLost || ++lost > joined) ++misplaced;
      // A callback may make calls.
      if (rpc::this_agent().sync<&refs::number>("learner", 7) != 7) ++misplaced;
      throw std::runtime_error("a callback's error is logged");
    });
    agent.on_worker_joined([&](const rpc::WorkerInfo& worker) {
      if (worker.name != "actor" || ++joined > lost + 1) ++misplaced;
    });
    Processes::say("ready");
    RRef<int> before;
    std::ptrdiff_t descriptors = 0, most_threads = 0;
    std::size_t bytes = 0;
    for (int generation = 0; generation < lives; ++generation) {
      auto [which, theirs] = killed_again::next_met();
      ASSERT_EQ(which, generation);
      EXPECT_EQ(agent.sync<&killed_again::which>("actor"), generation)
          << "the call reaches the new actor";
      EXPECT_TRUE(agent.alive("actor"));
      EXPECT_EQ(agent.worker("actor").rank, 1) << "the new actor has its predecessor's rank";
      EXPECT_EQ(theirs.to_here(), generation);
      if (generation > 0) {
        for (const auto& use : std::initializer_list<std::function<void()>>{
                 [&] { before.to_here(); },
                 [&] { agent.sync<&killed_again::plus_one>("actor", before); }}) {
          const auto error = error_of(use);
          EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
        }
      }
      // The present actor's reference is counted, and none of its predecessors'.
      EXPECT_TRUE(comes_true([&] { return agent.debug_info().owner_rrefs == 1; }))
          << agent.debug_info().owner_rrefs;
      EXPECT_TRUE(comes_true([&] { return lost == generation && joined == generation + 1; }))
          << lost << ", " << joined;
      EXPECT_EQ(agent.workers().size(), 2U);
      before = std::move(theirs);
      if (generation == 10) {
        EXPECT_TRUE(comes_true([&, now = harness::open_descriptors()]() mutable {
          return std::exchange(now, harness::open_descriptors()) == now;
        }));
        descriptors = harness::open_descriptors();
        bytes = harness::live_bytes();
      }
      if (generation <= 10) most_threads = std::max(most_threads, threads());
      if (generation < lives - 1) Processes::say("met");
    }
    EXPECT_EQ(misplaced, 0);
    EXPECT_TRUE(comes_true([&] { return harness::open_descriptors() <= descriptors; }))
        << harness::open_descriptors() << " descriptors, " << descriptors << " after ten kills";
    EXPECT_LT(threads(), most_threads + 8) << "threads grow with each kill";
    EXPECT_LE(harness::live_bytes(), bytes + (1 << 20));
    before = {};
    agent.sync<&killed_again::end>("actor");
    agent.shutdown({.timeout = 20s});
    EXPECT_TRUE(
        comes_true([&] { return agent.debug_info().owner_rrefs + agent.debug_info().forks == 0; }));
  });
  learner->wait_for(0, "ready");
  for (int generation = 0; generation < lives; ++generation) {
    const auto actor = job.actor(generation);
    if (generation == lives - 1) {
      actor->expect_success();
    } else {
      learner->wait_for(0, "met");
      actor->signal(0, SIGKILL);
    }
  }
  learner->expect_success();
}

// The learner's calls leave late, when another process has the name; it must not receive them.
TEST_P(KilledAgain, LateCallsDoNotReachTheSuccessor) {
  const Job job(GetParam());
  const auto learner = job.start([&] {
    auto options = job.options(0);
    options.faults.delay = {{rpc::MessageKind::Create, 1s}};
    auto agent = rpc::init("learner", options);
    Processes::say("ready");
    const auto first = killed_again::next_met();
    std::vector<RRef<int>> late;
    for (int i = 0; i < 10; ++i) late.push_back(agent.remote<&killed_again::touch>("actor"));
    Processes::say("sent");
    const auto second = killed_again::next_met();
    EXPECT_EQ(second.number, 1);
    for (const auto& one : late) {
      const auto error = error_of([&] { one.to_here(); });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
    }
    EXPECT_EQ(agent.sync<&killed_again::touches>("actor"), 0);
    const auto in_time = agent.remote<&killed_again::touch>("actor");
    EXPECT_EQ(in_time.to_here(), 1) << "a call in time reaches the successor";
    agent.sync<&killed_again::end>("actor");
    late.clear();
    agent.shutdown({.timeout = 20s});
  });
  learner->wait_for(0, "ready");
  auto first = job.actor(0);
  learner->wait_for(0, "sent");
  first->signal(0, SIGKILL);
  const auto second = job.actor(1);
  second->expect_success();
  learner->expect_success();
}

// Two workers are killed and one joins. All others are told, even those that have no connection to
// them.
TEST_P(KilledAgain, AllHearOfDeathsAndNewcomers) {
  constexpr int kActors = 6;
  const Job job(GetParam());
  const auto listen = [](rpc::Agent& agent) {
    agent.on_worker_lost(
        [](const rpc::WorkerInfo& worker, const Error&) { Processes::say("lost_" + worker.name); });
    agent.on_worker_joined(
        [](const rpc::WorkerInfo& worker) { Processes::say("joined_" + worker.name); });
  };
  const auto quiet = [&](const std::string& name, std::optional<int> rank) {
    return job.start([&job, listen, name, rank] {
      auto agent = rpc::init(name, job.options(rank));
      listen(agent);
      Processes::say("ready");
      killed_again::wait_for_end();
      EXPECT_FALSE(agent.alive("actor3"));
      EXPECT_FALSE(agent.alive("nobody"));
      EXPECT_EQ(error_of([&] { agent.sync<&refs::nothing>("actor3"); }).blame(), Blame::PeerLost);
      EXPECT_EQ(error_of([&] { agent.sync<&refs::nothing>("nobody"); }).blame(), Blame::Caller);
      if (agent.self().rank != 0) return agent.shutdown({.timeout = 20s});
      EXPECT_TRUE(comes_true([&] { return agent.workers().size() == 1; }));
      agent.shutdown({.timeout = 20s});
    });
  };
  std::vector<std::unique_ptr<Processes>> all;
  all.push_back(quiet("learner", 0));
  all.back()->wait_for(0, "ready");
  for (int actor = 1; actor <= kActors; ++actor) {
    all.push_back(quiet("actor" + std::to_string(actor), std::nullopt));
    all.back()->wait_for(0, "ready");
  }
  all[2]->signal(0, SIGKILL);
  auto late = quiet("late", std::nullopt);
  all[3]->signal(0, SIGKILL);
  late->wait_for(0, "ready");
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i == 2 || i == 3) continue;
    std::multiset<std::string> news;
    while (!news.contains("lost_actor2") || !news.contains("lost_actor3") ||
           !news.contains("joined_late")) {
      const auto word = all[i]->next_word(0);
      if (word.starts_with("lost_") || word == "joined_late") news.insert(word);
    }
    EXPECT_EQ(news.size(), 3U) << "each event is reported once";
  }
  // Another worker tells all others to end.
  const auto ends = job.start([&] {
    auto agent = rpc::init("ends", job.options());
    for (const std::string name : {"late", "learner", "actor1", "actor4", "actor5", "actor6"}) {
      EXPECT_TRUE(agent.alive(name));
    }
    const auto targets = agent.workers();
    agent.on_worker_lost([](const rpc::WorkerInfo& worker, const Error& why) {
      ADD_FAILURE() << worker.name << why.what();
    });
    std::vector<Future<void>> told;
    for (const auto& worker : targets) {
      if (worker.name != "ends") told.push_back(agent.async<&killed_again::end>(worker));
    }
    EXPECT_EQ(told.size(), 6U);
    for (const auto& one : told) one.get();
    agent.leave();
  });
  ends->expect_success();
  late->expect_success();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i != 2 && i != 3) all[i]->expect_success();
  }
}

// The killed worker hosts the store: no worker can join any more; the others are told so, go on,
// and end.
TEST_P(KilledAgain, OthersOutliveTheStoresHost) {
  const Job job(GetParam());
  auto host = job.start([&] {
    auto agent = rpc::init("host", job.options(0));
    Processes::say("ready");
    killed_again::wait_for_end();
  });
  host->wait_for(0, "ready");
  std::vector<std::unique_ptr<Processes>> all;
  for (const std::string name : {"a", "b"}) {
    all.push_back(job.start([&, name] {
      auto agent = rpc::init(name, job.options());
      agent.on_worker_lost([](const rpc::WorkerInfo& worker, const Error& why) {
        EXPECT_EQ(why.blame(), Blame::PeerLost);
        EXPECT_NE(why.text().find("no worker can join"), std::string::npos) << why.text();
        Processes::say("lost_" + worker.name);
      });
      const std::string other = name == "a" ? "b" : "a";
      EXPECT_TRUE(comes_true([&] { return agent.alive(other); }));
      EXPECT_EQ(agent.sync<&refs::number>(other, 3), 3);
      EXPECT_EQ(agent.sync<&refs::number>("host", 3), 3);
      Processes::say("ready");
      EXPECT_TRUE(comes_true([&] { return !agent.alive("host"); }));
      EXPECT_EQ(agent.sync<&refs::number>(other, 3), 3);
      EXPECT_EQ(error_of([&] { agent.sync<&refs::number>("host", 3); }).blame(), Blame::PeerLost);
      agent.sync<&killed_again::end>(other);
      killed_again::wait_for_end();
      agent.shutdown({.timeout = 20s});
    }));
  }
  for (auto& one : all) one->wait_for(0, "ready");
  host->signal(0, SIGKILL);
  for (auto& one : all) one->wait_for(0, "lost_host");
  for (auto& one : all) one->expect_success();
}

// Each kill comes at a random time, also while the worker joins, while all use each other's
// references.
class KilledAgainAnywhen : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(KilledAgainAnywhen, NobodyHangsAndNothingIsLeft) {
  constexpr int kWorkers = 4;
  constexpr int kKills = 12;
  const int seed = std::get<1>(GetParam());
  const Job job(std::get<0>(GetParam()));
  // True for errors about a missing worker, raised by this worker or by one that called it.
  const auto may_fail = [](const Error& error) {
    for (const std::string word : {"worker", "rank", "was not created"}) {
      if (error.text().find(word) != std::string::npos) return true;
    }
    return false;
  };
  const auto use = [&](int rank, int generation) {
    return job.start([&, rank, generation] {
      auto agent = rpc::init("worker" + std::to_string(rank),
                             job.options(rank == 0 ? std::optional(0) : std::nullopt));
      {
        RandomUser user(agent, kWorkers, (seed * kWorkers + rank) * 100 + generation, may_fail);
        Processes::say("ready");
        const auto is_told = [] {
          std::lock_guard lock(killed_again::mutex);
          return killed_again::is_over;
        };
        while (!is_told()) user.step();
      }
      if (rank != 0) return agent.leave();
      for (const auto& worker : agent.workers()) {
        const bool goes_by_itself = worker.name == "ends";
        if (worker.rank != 0 && !goes_by_itself) agent.sync<&killed_again::end>(worker);
      }
      EXPECT_TRUE(comes_true([&] { return agent.workers().size() == 1; }));
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
      agent.shutdown({.timeout = 20s});
    });
  };
  std::vector<std::unique_ptr<Processes>> all;
  for (int rank = 0; rank < kWorkers; ++rank) {
    all.push_back(use(rank, 0));
    all.back()->wait_for(0, "ready");
  }
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int generation = 1; generation <= kKills; ++generation) {
    const auto victim = 1 + random() % (kWorkers - 1);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
    all[victim]->signal(0, SIGKILL);
    all[victim] = use(static_cast<int>(victim), generation);
  }
  for (int rank = 1; rank < kWorkers; ++rank)
    all[static_cast<std::size_t>(rank)]->wait_for(0, "ready");
  const auto ends = job.start([&] {
    auto agent = rpc::init("ends", job.options());
    agent.sync<&killed_again::end>("worker0");
    agent.leave();
  });
  ends->expect_success();
  for (auto& one : all) one->expect_success();
}

INSTANTIATE_TEST_SUITE_P(Rpc, KilledAgain, testing::Values("shm", "tcp"),
                         [](const auto& one) { return one.param; });
INSTANTIATE_TEST_SUITE_P(Rpc, KilledAgainAnywhen,
                         testing::Combine(testing::Values("shm", "tcp"), testing::Range(0, 3)),
                         [](const auto& one) {
                           return std::get<0>(one.param) + "Seed" +
                                  std::to_string(std::get<1>(one.param));
                         });

}  // namespace
}  // namespace weft
