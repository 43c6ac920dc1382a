// SPDX-License-Identifier: Apache-2.0
// The lives of agents: workers that join open jobs, leave, and join again, and workers that may not
// join.
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/call/core.h>
#include <weft/tests/engine/rpc/workers.h>

namespace lives {

using namespace weft;

at::Tensor made() { return at::ones({2}); }
RRef<at::Tensor> keep_given(RRef<at::Tensor> given) { return given; }
int number(int value) { return value; }
// Constructed before main(), so it is destroyed after the library's own static variables, which are
// made on first use.
std::optional<rpc::Agent> of_static_storage;
[[noreturn]] void exit_with_an_agent() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  of_static_storage =
      rpc::init("worker0", {.rank = 0, .world_size = 1, .store = store, .transports = {"inproc"}});
  of_static_storage->sync<&number>("worker0", 1);
  std::exit(0);
}
void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

}  // namespace lives

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_alone;
using harness::run_workers;
using namespace std::chrono_literals;

TEST(AgentLife, AgentCanBeMadeAgain) {
  for (int generation = 0; generation < 3; ++generation) {
    run_workers({As::Threads, "shm", 2},
                [](rpc::Agent& agent) { agent.sync<&lives::pause>(1 - agent.self().rank, 0); });
  }
}

TEST(AgentLife, AgentCanBeMadeAgainAtOneAddress) {
  harness::Processes workers(4, [](int rank) {
    for (int generation = 0; generation < 5; ++generation) {
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank),
                                   {.rank = rank, .world_size = 4, .timeout = 30s});
      EXPECT_EQ(agent.sync<&lives::number>((rank + 1) % 4, generation), generation);
      agent.shutdown({.timeout = 30s});
    }
  });
  workers.expect_success();
}

TEST(AgentLifeDeathTest, StaticAgentMayOutliveMain) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(lives::exit_with_an_agent(), testing::ExitedWithCode(0), "");
}

TEST(AgentLife, WorkersMayJoinLateAndLeave) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank),
                     {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent first = join(0);
  {
    rpc::Agent second = join(1);
    second.sync<&lives::pause>(0, 0);
    first.sync<&lives::pause>("worker1", 0);
    {
      rpc::Agent third = join(2);
      third.sync<&lives::pause>(1, 0);
      first.sync<&lives::pause>(2, 0);
      EXPECT_EQ(first.workers().size(), 3U);
      third.shutdown();
    }
    EXPECT_EQ(first.workers().size(), 2U);
    second.shutdown();
  }
  // By name, rank and handle, before and after its connection has ended.
  for (const rpc::Destination& left : {rpc::Destination("worker1"), rpc::Destination(1),
                                       rpc::Destination(rpc::WorkerInfo{"worker1", 1})}) {
    EXPECT_EQ(error_of([&] { first.sync<&lives::pause>(left, 0); }).blame(), Blame::PeerLost);
  }
  EXPECT_TRUE(harness::comes_true([&] {
    const auto error = error_of([&] { first.sync<&lives::pause>("worker1", 0); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
    return error.text().find("worker1 (rank 1) has left") != std::string::npos;
  }));
  EXPECT_EQ(error_of([&] { first.sync<&lives::pause>("worker3", 0); }).blame(), Blame::Caller)
      << "this worker has never joined";
  first.shutdown();
}

// A store whose answers about workers wait while it is held.
class HeldStore : public c10d::HashStore {
 public:
  void hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  // Returns false if an answer was held for more than 10 s.
  bool release() {
    std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
    return !waited_too_long_;
  }
  bool wait_until_asked() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 30s, [&] { return asked_; });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (value == 0 && key.ends_with("joined")) wait_while_held();
    return c10d::HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    if (keys.front().find("worker/") != std::string::npos) wait_while_held();
    return c10d::HashStore::check(keys);
  }

 private:
  void wait_while_held() {
    std::unique_lock lock(mutex_);
    if (!held_) return;
    asked_ = true;
    changed_.notify_all();
    if (!changed_.wait_for(lock, 10s, [&] { return !held_; })) waited_too_long_ = true;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false, asked_ = false, waited_too_long_ = false;
};

TEST(AgentLife, UnresponsiveStoreBlocksNoCalls) {
  const auto store = c10::make_intrusive<HeldStore>();
  const auto join = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank),
                     {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent first = join(0), second = join(1), third = join(2);
  EXPECT_EQ(first.sync<&lives::number>(2, 1), 1);
  const auto held = second.remote<&lives::number>(0, 4);
  EXPECT_EQ(held.to_here(), 4);
  // The second leaves without telling the first, which asks the store what has become of the worker
  // that refers to its value.
  store->hold();
  second.leave();
  EXPECT_TRUE(store->wait_until_asked());
  EXPECT_EQ(first.sync<&lives::number>(2, 2), 2);
  EXPECT_TRUE(store->release());
  while (first.debug_info().owner_rrefs > 0) std::this_thread::yield();
  third.leave();
  first.leave();
}

// Here the first looks up the owner of a reference that it is given.
TEST(AgentLife, LookingUpAnOwnerBlocksNoCalls) {
  const auto store = c10::make_intrusive<HeldStore>();
  const auto join = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank),
                     {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent first = join(0), second = join(1), third = join(2);
  EXPECT_EQ(second.sync<&lives::number>(0, 1), 1);
  const auto value = second.remote<&lives::made>(2);
  EXPECT_EQ(value.to_here().numel(), 2);
  // Forgets it, as the end of the connection would.
  const auto core = call::detail::CoreCalls::of(first);
  EXPECT_TRUE(harness::comes_true([&] { return core->directory().known().worker(2).has_value(); }));
  core->directory().forget(2);
  store->hold();
  const auto given = second.async<&lives::keep_given>(0, value);
  EXPECT_TRUE(store->wait_until_asked());
  EXPECT_EQ(second.sync<&lives::number>(0, 2), 2);
  EXPECT_TRUE(store->release());
  EXPECT_EQ(given.get().owner().name, "worker2");
  third.leave();
  second.leave();
  first.leave();
}

TEST(AgentLife, RefusedNameStaysWithItsHolder) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](const std::string& name, int rank) {
    return rpc::init(name, {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent first = join("a", 0);
  for (const int rank : {1, 2}) {
    const auto error = error_of([&] { join("a", rank); });
    EXPECT_NE(error.text().find("not unique"), std::string::npos) << error.text();
  }
  for (const std::string name :
       {"b", "c"}) {  // the rank is free again, and again when its worker has left
    rpc::Agent second = join(name, 1);
    second.sync<&lives::pause>("a", 0);
    // The ids of the earlier worker's references must not be taken for this one's.
    EXPECT_EQ(second.remote<&lives::number>("a", 4).to_here(), 4);
    first.sync<&lives::pause>(name, 0);
    second.shutdown();
  }
  first.shutdown();
}

// The message that ends a reference cannot be delivered, and its next attempt is due after the
// agent has left.
TEST(AgentLife, RetriedMessageKeepsNoAgentAlive) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank),
                     {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent first = join(0), second = join(1);
  auto reference = first.remote<&lives::number>(1, 4);
  EXPECT_EQ(reference.to_here(), 4);
  second.leave();
  reference = {};
  const std::weak_ptr<call::AgentCore> core = call::detail::CoreCalls::of(first);
  first.leave();
  first = {};
  for (int i = 0; i < 500 && !core.expired(); ++i) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(core.expired());
}

TEST(AgentLife, WorkerWithoutRankTakesAFreeOne) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](const std::string& name, std::optional<int> rank = std::nullopt) {
    return rpc::init(name, {.rank = rank, .store = store, .transports = {"inproc"}});
  };
  rpc::Agent second = join("second");
  EXPECT_EQ(second.self().rank, 1) << "rank 0 goes only to a worker that asks for it";
  rpc::Agent first = join("first", 0), fourth = join("fourth", 3), third = join("third"),
             fifth = join("fifth");
  EXPECT_EQ(third.self().rank, 2);
  EXPECT_EQ(fifth.self().rank, 4);
  EXPECT_EQ(first.sync<&lives::number>("fifth", 4), 4);
  EXPECT_EQ(fifth.sync<&lives::number>(1, 4), 4);
  second.leave();
  third.leave();
  rpc::Agent again = join("third"), other = join("other");
  EXPECT_EQ(again.self().rank, 2) << "it gets the rank that its name had before";
  EXPECT_EQ(other.self().rank, 1) << "it gets the lowest free rank";
  EXPECT_EQ(first.sync<&lives::number>("third", 5), 5);
  const auto error = error_of([&] { join("third"); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_NE(error.text().find("the name 'third' is not unique"), std::string::npos) << error.text();
  EXPECT_EQ(first.workers().size(), 5U) << "the refused worker is not listed";
  for (rpc::Agent* agent : {&fourth, &fifth, &again, &other, &first}) agent->leave();
}

TEST(AgentLife, WorkerWithoutRankHostsNoStore) {
  // env:// would take the rank from this variable.
  ::unsetenv("RANK");
  const auto error =
      error_of([&] { rpc::init("a", {.init_method = "tcp://127.0.0.1:1", .timeout = 1s}); });
  EXPECT_NE(error.text().find("which the worker that is given rank 0 hosts"), std::string::npos)
      << error.what();
  EXPECT_EQ(error_of([&] { rpc::init("a", {.init_method = "env://", .timeout = 1s}); }).blame(),
            Blame::Caller);
  EXPECT_EQ(error_of([&] {
              rpc::init("a", {.init_method = "tcp://239.1.1.1:7000", .timeout = 1s});
            }).blame(),
            Blame::Caller);
  const std::string file =
      "file://" + testing::TempDir() + "/weft_open_job_" + std::to_string(::getpid());
  rpc::Agent first = rpc::init("a", {.init_method = file, .transports = {"inproc"}});
  rpc::Agent second = rpc::init("b", {.init_method = file, .transports = {"inproc"}});
  EXPECT_EQ(first.self().rank + second.self().rank, 3);
  EXPECT_EQ(first.sync<&lives::number>("b", 3), 3);
  second.leave();
  first.leave();
}

// Ids have 16 bits for a rank: such workers would make ids of the worker of rank modulo 65536.
TEST(AgentLife, RankAbove65535IsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](int rank, std::optional<int> world_size = {}) {
    return rpc::init(
        "worker" + std::to_string(rank),
        {.rank = rank, .world_size = world_size, .store = store, .transports = {"inproc"}});
  };
  for (const int rank : {65536, 65537, 1 << 20}) {
    for (const auto world_size : {std::optional<int>(), std::optional(rank + 1)}) {
      const auto error = error_of([&] { join(rank, world_size); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_NE(error.text().find("rank " + std::to_string(rank) + " is too high"),
                std::string::npos)
          << error.text();
      EXPECT_NE(error.text().find("from 0 to 65535"), std::string::npos) << error.text();
    }
  }
  // 65535 is the highest rank.
  rpc::Agent first = join(0), last = join(65535);
  const auto there = last.remote<&lives::number>(0, 4);
  EXPECT_EQ(there.to_here(), 4);
  EXPECT_EQ(rref::rank_in(there.handle()->id()), 65535);
  last.shutdown();
  first.shutdown();
}

TEST(AgentLife, WorkerOfAnotherJobKindIsRefused) {
  for (const bool open : {true, false}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto join = [&](const std::string& name, int rank, std::optional<int> world_size) {
      return rpc::init(
          name, {.rank = rank, .world_size = world_size, .store = store, .transports = {"inproc"}});
    };
    const auto one = open ? std::nullopt : std::optional(1);
    const auto other = open ? std::optional(2) : std::nullopt;
    rpc::Agent first = join("a", 0, one);
    for (int again = 0; again < (open ? 1 : 2);
         ++again) {  // a fixed job's rank that joins again belongs to its next restart
      const auto error = error_of([&] { join("b", 1, other); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_NE(error.text().find("they cannot be in one job"), std::string::npos) << error.what();
    }
    EXPECT_EQ(first.sync<&lives::number>("a", 3), 3);
    if (open) {
      rpc::Agent second = join("c", 1, one);
      EXPECT_EQ(second.sync<&lives::number>("a", 4), 4);
      second.shutdown();
    }
    first.shutdown();
  }
}

TEST(AgentNames, TwoEqualNamesFailEveryWorker) {
  run_alone({As::Threads, "inproc", 3}, [](const rpc::Options& options) {
    const auto error = error_of([&] { rpc::init(*options.rank == 2 ? "other" : "same", options); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("not unique"), std::string::npos) << error.what();
  });
}

TEST(AgentNames, BadCharactersOrLengthAreRefused) {
  const rpc::Options options{
      .rank = 0, .world_size = 1, .store = c10::make_intrusive<c10d::HashStore>()};
  for (const std::string name : {"abc*", " ", "", "a b"}) {
    EXPECT_EQ(error_of([&] { rpc::init(name, options); }).blame(), Blame::Caller) << name;
  }
  EXPECT_EQ(error_of([&] { rpc::init(std::string(500, 'a'), options); }).blame(), Blame::Caller);
  EXPECT_EQ(error_of([&] { rpc::init(std::string(128, 'a'), options); }).blame(), Blame::Caller);
  rpc::Agent agent = rpc::init("Az09_:-" + std::string(120, 'a'), options);
  agent.shutdown();
}

TEST(AgentNames, OneNameForAllFailsEveryWorker) {
  run_alone({As::Threads, "inproc", 3}, [](const rpc::Options& options) {
    const auto error = error_of([&] { rpc::init("same", options); });
    EXPECT_NE(error.text().find("not unique"), std::string::npos) << error.what();
  });
}

TEST(AgentLife, SecondInitOfARankIsRefused) {
  const rpc::Options options{.rank = 0,
                             .world_size = 1,
                             .store = c10::make_intrusive<c10d::HashStore>(),
                             .transports = {"inproc"}};
  rpc::Agent first = rpc::init("first", options);
  for (const std::string name : {"first", "second"}) {
    const auto error = error_of([&] { rpc::init(name, options); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("already initialized"), std::string::npos) << error.text();
  }
  EXPECT_EQ(first.sync<&lives::number>(0, 3), 3);
  // Another job, over the same store and over another one.
  auto other = options;
  other.group_name = "other";
  rpc::Agent beside = rpc::init("first", other);
  EXPECT_EQ(beside.sync<&lives::number>(0, 3), 3);
  other.store = c10::make_intrusive<c10d::HashStore>();
  rpc::init("first", other).shutdown();
  beside.shutdown();
  EXPECT_EQ(first.sync<&lives::number>(0, 3), 3);
  first.shutdown();
  rpc::init("again", options).shutdown();
}

// Expects that both of two workers with these options throw an error with `text` at once.
void expect_both_refused(const std::function<rpc::Options(int rank)>& options,
                         const std::string& text) {
  harness::Processes processes(2, [&](int rank) {
    const auto error = error_of([&] { rpc::init("worker" + std::to_string(rank), options(rank)); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
    EXPECT_NE(error.text().find(text), std::string::npos) << error.text();
  });
  processes.expect_success();
}

TEST(AgentLife, DifferentWorldSizesFailAllWorkers) {
  expect_both_refused([](int rank) { return rpc::Options{.world_size = rank + 2}; },
                      "; all workers of a job give the same rpc::Options::world_size");
}

TEST(AgentLife, TwoWorkersOfOneRankBothFail) {
  expect_both_refused([](int) { return rpc::Options{.rank = 0}; }, "rank 0 is taken by 'worker");
}

TEST(AgentLife, InvalidOptionsAreRefusedAtOnce) {
  const rpc::Options good{
      .rank = 0, .world_size = 1, .store = c10::make_intrusive<c10d::HashStore>()};
  const auto refused = [&](auto change) {
    rpc::Options options = good;
    change(options);
    return error_of([&] { rpc::init("a", options); });
  };
  EXPECT_EQ(refused([](rpc::Options& options) { options.worker_threads = 0; }).blame(),
            Blame::Caller);
  EXPECT_EQ(refused([](rpc::Options& options) { options.timeout = -1ms; }).blame(), Blame::Caller);
  EXPECT_EQ(refused([](rpc::Options& options) { options.transports = {"carrier pigeon"}; }).blame(),
            Blame::Caller);
  EXPECT_EQ(refused([](rpc::Options& options) { options.rank = 1; }).blame(), Blame::Caller);
  rpc::init("a", good).shutdown();  // nothing remains of the refused ones
}

}  // namespace
}  // namespace weft
