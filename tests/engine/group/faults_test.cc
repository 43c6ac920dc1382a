// SPDX-License-Identifier: Apache-2.0
// Errors and survival of the other ranks when one is killed or stopped.
#include <algorithm>
#include <csignal>
#include <optional>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/engine/group/access.h>
#include <weft/engine/group/core.h>
#include <weft/group.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::error_of;
using harness::Processes;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Longer than each rank may run (harness::kLimit), so no error below is this timeout.
constexpr seconds kForever{1000};

void expect_lost(const Error& error, const std::string& who) {
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_NE(error.text().find(who + " is lost"), std::string::npos) << error.text();
}

ProcessGroup join(milliseconds timeout = kForever) {
  return init_process_group({.timeout = timeout});
}

[[noreturn]] void wait_for_the_end() {
  for (;;) ::pause();
}

// Runs ranks that meet. Then `victim` is killed while it does nothing; the others run `pending`
// meanwhile.
void with_a_killed_rank(int ranks, int victim, const std::function<void(ProcessGroup&)>& pending) {
  Processes processes(ranks, [=](int rank) {
    auto group = join();
    group.barrier().wait();
    Processes::say("ready");
    if (rank == victim) wait_for_the_end();
    const std::string who = "rank " + std::to_string(victim);
    expect_lost(error_of([&] { pending(group); }), who);
    // Every later call fails as well.
    expect_lost(error_of([&] { group.all_reduce(torch::ones({1})).wait(); }), who);
    expect_lost(error_of([&] { group.send(torch::ones({1}), (rank + 1) % ranks).wait(); }), who);
    expect_lost(error_of([&] { group.new_group({0, 1, 2}); }), who);
    expect_lost(error_of([&] { group.split(0, 0); }), who);
  });
  for (int rank = 0; rank < ranks; ++rank) processes.wait_for(rank, "ready");
  processes.signal(victim, SIGKILL);
  processes.expect_success({victim});
}

TEST(KilledRank, IsNamedByAPendingAllReduce) {
  with_a_killed_rank(3, 1,
                     [](ProcessGroup& group) { group.all_reduce(torch::ones({1000})).wait(); });
}

TEST(KilledRank, NewGroupIsAdvised) {
  for (const int victim : {0, 1}) {
    with_a_killed_rank(3, victim, [](ProcessGroup& group) {
      const auto error = error_of([&] { group.barrier().wait(); });
      EXPECT_NE(error.text().find("make a group of the living ranks with new_group"),
                std::string::npos)
          << error.text();
      throw error;
    });
  }
}

TEST(KilledRank, FutureAndWaitGiveTheSameError) {
  with_a_killed_rank(3, 1, [](ProcessGroup& group) {
    Work work = group.all_reduce(torch::ones({1000}));
    auto future = work.future();
    const auto error = error_of([&] { future.get(); });
    EXPECT_EQ(error.text(), error_of([&] { work.wait(); }).text());
    throw Error(error);
  });
}

// With tcp, both the group and the connections report the loss.
TEST(KilledRank, IsNamedOnce) {
  Processes processes(2, [](int rank) {
    auto group = init_process_group({.backend = "tcp", .timeout = kForever});
    group.barrier().wait();
    Processes::say("ready");
    if (rank == 1) wait_for_the_end();
    const auto error = error_of([&] { group.all_reduce(torch::ones({1000})).wait(); });
    expect_lost(error, "rank 1");
    EXPECT_EQ(error.text().find("rank 1 is lost"), error.text().rfind("rank 1 is lost"))
        << error.text();
  });
  for (int rank = 0; rank < 2; ++rank) processes.wait_for(rank, "ready");
  processes.signal(1, SIGKILL);
  processes.expect_success({1});
}

TEST(KilledRank, IsNamedByAPendingBarrier) {
  with_a_killed_rank(3, 2, [](ProcessGroup& group) { group.barrier().wait(); });
}

TEST(KilledRank, IsNamedByAMonitoredBarrier) {
  with_a_killed_rank(3, 2, [](ProcessGroup& group) { group.monitored_barrier(kForever); });
}

TEST(KilledRank, IsNamedByAReceiveFromAnotherRank) {
  with_a_killed_rank(
      3, 2, [](ProcessGroup& group) { group.recv(torch::ones({1}), 1 - group.rank()).wait(); });
}

TEST(KilledRank, IsNamedByAReceiveFromAnySource) {
  with_a_killed_rank(3, 1, [](ProcessGroup& group) { group.recv(torch::ones({1})).wait(); });
}

TEST(KilledRank, IsNamedByALargePendingSend) {
  with_a_killed_rank(3, 1,
                     [](ProcessGroup& group) { group.send(torch::ones({8 << 20}), 1).wait(); });
}

// Rank 0 hosts the store and hears first of a death; its own death must be reported as clearly.
TEST(KilledRank, IsNamedIfItHostsTheStore) {
  with_a_killed_rank(3, 0,
                     [](ProcessGroup& group) { group.all_reduce(torch::ones({1000})).wait(); });
}

TEST(KilledRank, IsNamedInALoopOfCollectives) {
  Processes processes(3, [](int rank) {
    auto group = join();
    const auto error = error_of([&] {
      for (int step = 0;; ++step) {
        group.all_reduce(torch::ones({10'000})).wait();
        if (rank == 2 && step == 20) Processes::say("ready");
      }
    });
    expect_lost(error, "rank 2");
  });
  processes.wait_for(2, "ready");
  processes.signal(2, SIGKILL);
  processes.expect_success({2});
}

TEST(KilledRank, BreaksOnlyItsOwnGroups) {
  Processes processes(3, [](int rank) {
    auto group = join();
    auto pair = group.new_group({0, 1});
    auto other = group.new_group({1, 2});
    Processes::say("ready");
    if (rank == 2) wait_for_the_end();
    expect_lost(error_of([&] { group.barrier().wait(); }), "rank 2");
    if (rank == 1) {
      expect_lost(error_of([&] { other.barrier().wait(); }), "rank 1");  // its rank in that group
    }
    const auto tensor = torch::ones({1});
    pair.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 2);
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(2, SIGKILL);
  processes.expect_success({2});
}

class LostRank : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(By, LostRank, testing::Values("gloo", "tcp", "shm"),
                         [](const auto& given) { return std::string(given.param); });

// The survivors also go on after one of them has left; a call that names a lost rank fails at once.
TEST_P(LostRank, SurvivorsMakeANewGroup) {
  const std::string backend = GetParam();
  Processes processes(4, [backend](int rank) {
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    const auto sum_of_ones = [](ProcessGroup& of) {
      const auto ones = torch::ones({1000});
      of.all_reduce(ones).wait();
      return ones[999].item<float>();
    };
    sum_of_ones(group);
    Processes::say("ready");
    if (rank == 1) wait_for_the_end();
    expect_lost(error_of([&] { sum_of_ones(group); }), "rank 1");
    EXPECT_EQ(group.living_ranks(), (std::vector<int>{0, 2, 3}));
    auto rest = group.new_group({3, 0, 2});
    EXPECT_EQ(rest.living_ranks(), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(sum_of_ones(rest), 3);
    expect_lost(error_of([&] { group.new_group({0, 1, 2, 3}); }), "rank 1");
    expect_lost(error_of([&] { sum_of_ones(group); }), "rank 1");
    expect_lost(error_of([&] { group.split(0, 0); }), "rank 1");
    EXPECT_EQ(sum_of_ones(rest), 3);
    if (rank == 2) return;
    rest = ProcessGroup();
    auto two = group.new_group({0, 3});
    EXPECT_EQ(sum_of_ones(two), 2);
    EXPECT_EQ(error_of([&] { group.new_group({0, 2, 3}); }).blame(), Blame::PeerLost);
    EXPECT_TRUE(harness::comes_true([&] {
      return group.living_ranks() == std::vector<int>{0, 3};
    }));
    EXPECT_EQ(sum_of_ones(two), 2);
  });
  for (int rank = 0; rank < 4; ++rank) processes.wait_for(rank, "ready");
  processes.signal(1, SIGKILL);
  processes.expect_success({1});
}

// Rank 0 hosts the store, and is the root of membership's tree; then rank 1 is.
TEST_P(LostRank, MayBeTheLowestAgainAndAgain) {
  const std::string backend = GetParam();
  constexpr int kRanks = 5;
  Processes processes(kRanks, [backend](int rank) {
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    group.barrier().wait();
    for (int victim = 0; victim < 3; ++victim) {
      Processes::say("ready " + std::to_string(victim));
      if (rank == victim) wait_for_the_end();
      expect_lost(error_of([&] { group.barrier().wait(); }), "rank 0");
      group = group.new_group(group.living_ranks());
      ASSERT_EQ(group.size(), kRanks - 1 - victim);
      const auto ones = torch::ones({1000});
      group.all_reduce(ones).wait();
      EXPECT_EQ(ones[999].item<float>(), static_cast<float>(group.size()));
      group.monitored_barrier(kForever);
      EXPECT_EQ(group.split(0, 0).size(), group.size());
    }
  });
  for (int victim = 0; victim < 3; ++victim) {
    for (int rank = victim; rank < kRanks; ++rank)
      processes.wait_for(rank, "ready " + std::to_string(victim));
    processes.signal(victim, SIGKILL);
  }
  processes.expect_success({0, 1, 2});
}

// By then rank 0, which reports losses, has left in an orderly way.
TEST_P(LostRank, FailsReceivesAfterRankZeroLeft) {
  const std::string backend = GetParam();
  Processes processes(3, [backend](int rank) {
    auto group = init_process_group({.backend = backend, .timeout = seconds(3)});
    harness::meet(group);
    if (rank == 0) {  // hosts the store, which the others may still need to learn that all have met
      group.store()->wait({"past the meeting/1", "past the meeting/2"}, seconds(60));
      return;
    }
    group.store()->set("past the meeting/" + std::to_string(rank), std::string("yes"));
    Processes::say("met");
    if (rank == 1) wait_for_the_end();
    const auto error = error_of([&] { group.recv(torch::ones({1})).wait(); });
    // Gloo does not fail such a receive when one connection of several breaks.
    if (error.blame() != Blame::Timeout) {
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
      EXPECT_EQ(error.ranks(), std::vector<int>{1}) << error.text();
      return;
    }
    EXPECT_NE(error.text().find("let it leave last"), std::string::npos) << error.text();
    EXPECT_EQ(error.text().find("let it leave last"), error.text().rfind("let it leave last"))
        << error.text();
    const auto next = error_of([&] { group.barrier().wait(); });
    EXPECT_NE(next.text().find("let it leave last"), std::string::npos) << next.what();
  });
  for (const int rank : {1, 2}) processes.wait_for(rank, "met");
  EXPECT_THROW(processes.next_word(0), Error) << "rank 0 has ended";
  processes.signal(1, SIGKILL);
  processes.expect_success({1});
}

// Reads memory that an operation is writing (no program may do so) to learn that it has begun.
__attribute__((noinline, no_sanitize("thread"))) bool has_begun(const volatile float* numbers) {
  return *numbers != 0;
}

// A rank that goes on may load a checkpoint into this memory.
TEST_P(LostRank, FailedOperationWritesNoMore) {
  const std::string backend = GetParam();
  Processes processes(2, [backend](int rank) {
    auto all = init_process_group({.backend = backend, .timeout = kForever});
    for (int round = 0; round < 2; ++round) {
      auto group = all.new_group({0, 1});
      const at::Tensor data = torch::full({16 << 20}, rank == 0 ? 1 : 0, at::kFloat);
      auto* const numbers = data.data_ptr<float>();
      harness::meet(group);
      const Work work = group.broadcast(data, 0);
      if (rank == 1) {
        // Aborts in the middle of the operation.
        while (!has_begun(numbers)) continue;
        group.abort("enough");
      }
      const bool failed =
          harness::comes_true([&] { return work.query(); }) && work.error().has_value();
      const auto is_untouched = [&] {
        return std::all_of(numbers, numbers + data.numel(), [](float one) { return one == 7; });
      };
      if (failed) data.fill_(7);
      for (int turn = 0; turn < 2; ++turn) {
        all.barrier().wait();
        if (rank == 1 && failed) {
          EXPECT_TRUE(is_untouched()) << "in round " << round;
        }
      }
    }
  });
  processes.expect_success();
}

TEST(KilledRank, IsNoticedByRanksThatAreJoining) {
  Processes processes(3, [](int rank) {
    if (rank == 2) {
      Processes::say("ready");
      wait_for_the_end();  // this rank never joins
    }
    const auto error = error_of([&] { join(rank == 0 ? seconds(4) : seconds(30)); });
    // Rank 0 gives up first and names the rank it waited for; the store ends with it.
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_EQ(error.ranks(), std::vector<int>{2});
    EXPECT_NE(error.text().find("rank 2 did not come within 4 s"), std::string::npos)
        << error.text();
  });
  processes.wait_for(2, "ready");
  processes.signal(2, SIGKILL);
  processes.expect_success({2});
}

TEST(KilledRank, IsNotWaitedForWhenOthersLeave) {
  Processes processes(3, [](int rank) {
    auto group = join();
    static_cast<void>(group.barrier());
    Processes::say("ready");
    if (rank == 1) wait_for_the_end();
    // Dropping a group waits for the other living ranks, not for dead ones.
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(1, SIGKILL);
  processes.expect_success({1});
}

// A rank that leaves by an exception is named, just like one that is killed.
TEST(LeavingRank, IsNamedIfItLeftByAnException) {
  Processes processes(3, [](int rank) {
    auto group = join();
    harness::meet(group);
    if (rank == 1) {
      try {
        const auto copy = std::move(group);
        throw std::runtime_error("a bad batch");
      } catch (const std::runtime_error&) {
        return;
      }
    }
    const auto error = error_of([&] { group.all_reduce(torch::ones({1})).wait(); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_NE(error.text().find("rank 1 left the group by an exception"), std::string::npos)
        << error.text();
  });
  processes.expect_success();
}

// The rank cannot start a thread, not even for joining.
TEST(LeavingRank, IsNamedIfItCannotJoinASubgroup) {
  {
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads())
      GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
  }
  Processes processes(2, [](int rank) {
    auto group = join();
    harness::meet(group);
    std::optional<harness::NoMoreThreads> no_more;
    if (rank == 1) no_more.emplace();
    const auto error = error_of([&] { group.new_group({0, 1}); });
    EXPECT_EQ(error.blame(), rank == 1 ? Blame::Busy : Blame::PeerLost) << error.what();
    EXPECT_NE(error.text().find("starting a thread"), std::string::npos) << error.text();
  });
  processes.expect_success();
}

// As if there were no memory for a copy made before the collective. Both ranks fail and go on.
TEST(LeavingRank, WaitsForNoUnstartedCollective) {
  Processes processes(2, [](int rank) {
    auto group = join();
    group::Operation operation{
        .name = "reduce_scatter", .device = at::kCPU, .tensors = {torch::ones({4})}};
    operation.prepare = [] { throw std::bad_alloc(); };
    const auto nothing = [](transport::Communicator&, const Pin&, const Fence&, std::vector<Op>&) {
    };
    EXPECT_THROW(
        static_cast<void>(group::Core::of(group).operations.issue(std::move(operation), nothing)),
        std::bad_alloc);
    const auto sum = torch::ones({1});
    group.all_reduce(sum).wait();
    EXPECT_EQ(sum.item<float>(), 2);
    const auto store = group.store();
    if (rank == 0) return store->wait({"left"});
    { const auto ends = std::move(group); }
    store->set("left", std::vector<std::uint8_t>());
  });
  processes.expect_success();
}

TEST(StoppedRank, TimesOutPendingAndLaterOperations) {
  Processes processes(3, [](int rank) {
    auto group = join(seconds(3));
    group.barrier().wait();
    Processes::say("ready");
    if (rank == 1) wait_for_the_end();
    // The first rank to run out of time closes its connections, which the other may notice first.
    const auto timed_out = [](const Error& error) {
      EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost)
          << error.what();
    };
    timed_out(error_of([&] { group.all_reduce(torch::ones({1})).wait(); }));
    timed_out(error_of([&] { group.barrier().wait(); }));
    timed_out(error_of([&] { group.recv(torch::ones({1}), 1).wait(); }));
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(1, SIGSTOP);
  processes.expect_success({1});
}

// The news of rank 2's death reaches rank 1 through rank 0, long after its connection has ended.
TEST(StoppedRank, HoldsUpTheNewsOfALossButNotItsName) {
  Processes processes(3, [](int rank) {
    auto group = join();
    group.barrier().wait();
    const auto number = torch::ones({1});
    if (rank == 2) group.send(number, 1).wait();
    if (rank == 1) group.recv(number, 2).wait();
    Processes::say("ready");
    if (rank == 2) wait_for_the_end();
    if (rank == 0) return expect_lost(error_of([&] { group.barrier().wait(); }), "rank 2");
    const auto later = group.recv(torch::ones({1}), 2).future();
    expect_lost(error_of([&] { group.recv(number, 2).wait(); }), "rank 2");
    expect_lost(error_of([&] { later.get(); }), "rank 2");
    // Rank 0 may have left the group already.
    const auto living = group.living_ranks();
    EXPECT_EQ(std::count(living.begin(), living.end(), 2), 0);
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(0, SIGSTOP);
  processes.signal(2, SIGKILL);
  // Longer than a rank waits for news without a reason. With less, the test would show less.
  std::this_thread::sleep_for(seconds(3));
  processes.signal(0, SIGCONT);
  processes.expect_success({2});
}

// Its process ends in order, so no news of a loss comes; the sender would wait for a minute.
TEST(RankThatHasLeft, IsNotAwaitedByTheSenderOfALongMessage) {
  Processes processes(2, [](int rank) {
    auto group = join();
    group.barrier().wait();
    const auto store = group.store();
    if (rank == 0) return store->wait({"sent"});
    auto sent = group.send(torch::ones({10'000'000}), 0);
    store->set("sent", std::vector<std::uint8_t>());
    EXPECT_EQ(error_of([&] { sent.wait(); }).blame(), Blame::PeerLost);
  });
  processes.expect_success();
}

TEST(StoppedRank, IsNamedByTheMonitoredBarrier) {
  Processes processes(3, [](int rank) {
    auto group = join();
    group.barrier().wait();
    Processes::say("ready");
    if (rank == 2) wait_for_the_end();
    if (rank == 0)
      group::store_of(group).get_all({"monitored/1/1"}, Deadline::in(kForever));  // rank 1 has come
    const auto limit = milliseconds(rank == 0 ? 500 : 20'000);
    const auto error = error_of([&] { group.monitored_barrier(limit); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_NE(error.text().find("rank 2 did not come"), std::string::npos) << error.text();
    // Neither rank leaves before both have been told, and rank 0, which hosts the store, not before
    // the other has read from it.
    group.store()->set("told " + std::to_string(rank), std::vector<std::uint8_t>());
    group.store()->wait({rank == 0 ? "told 1" : "told 0"});
    if (rank == 1) group.store()->set("rank 1 is through", std::vector<std::uint8_t>());
    if (rank == 0) group.store()->wait({"rank 1 is through"});
    group.abort("rank 2 hangs");  // otherwise leaving would wait for rank 2
  });
  for (int rank = 0; rank < 3; ++rank) processes.wait_for(rank, "ready");
  processes.signal(2, SIGSTOP);
  processes.expect_success({2});
}

// The first rank of a group keeps its store.
TEST(StoppedRank, KeepsAStoreUnderItsRankInTheGroup) {
  Processes processes(3, [](int rank) {
    auto group = join();
    auto some = group.new_group({1, 2}, {.timeout = seconds(2)});
    if (rank == 0) wait_for_the_end();
    auto process = torch::full({1}, static_cast<std::int64_t>(::getpid()));
    some.broadcast(process, 0).wait();
    if (rank == 1) wait_for_the_end();
    ::kill(static_cast<pid_t>(process.item<std::int64_t>()), SIGSTOP);
    const auto late = error_of([&] { some.monitored_barrier(seconds(2)); });
    EXPECT_EQ(late.blame(), Blame::Timeout) << late.what();
    EXPECT_EQ(late.ranks(), std::vector<int>{0}) << late.what();
    EXPECT_NE(late.text().find("rank 0"), std::string::npos) << late.text();
    some.abort("its first rank is stopped");
    group.abort("rank 1 is stopped");
  });
  processes.expect_success({0, 1});
}

// Rank 0 keeps the store in which the ranks meet. Without its answer a rank still heeds the limit
// of the barrier and an abort, and says for whom it waits.
TEST(StoppedRank, DoesNotHoldUpOthersAsKeeperOfTheStore) {
  Processes processes(3, [](int rank) {
    ProcessGroupOptions options{.timeout = kForever};
    options.wait_reports = {seconds(8)};
    auto group = init_process_group(options);
    auto process = torch::full({1}, static_cast<std::int64_t>(::getpid()));
    group.broadcast(process, 0).wait();
    if (rank == 0) wait_for_the_end();
    if (rank == 2) group.send(process, 1).wait();
    if (rank == 1) group.recv(process, 2).wait();
    if (rank == 1) ::kill(static_cast<pid_t>(process.item<std::int64_t>()), SIGSTOP);
    if (rank == 1) group.send(process, 2).wait();
    if (rank == 2) group.recv(process, 1).wait();
    const auto late = error_of([&] { group.monitored_barrier(milliseconds(100)); });
    EXPECT_EQ(late.blame(), Blame::Timeout) << late.what();
    EXPECT_EQ(late.ranks(), std::vector<int>{0}) << late.what();
    const auto& watch = harness::LogWatch::current();
    const std::string report =
        "in the making of group 'default/0-2': rank 0, which keeps the group's store, did not "
        "answer in time";
    std::thread aborting([&] {
      EXPECT_TRUE(harness::comes_true(
          [&] { return watch.text().find(report) != std::string::npos; }, seconds(40)));
      group.abort("rank 0 hangs");
    });
    const auto aborted = error_of([&] { group.new_group({0, 1, 2}); });
    EXPECT_EQ(aborted.blame(), Blame::Cancelled) << aborted.what();
    aborting.join();
  });
  processes.expect_success({0});
}

TEST(LateRank, BarrierTimesOutNotBeforeItsLimit) {
  Processes processes(2, [](int rank) {
    auto group = join(seconds(3));
    auto other =
        init_process_group({.init_method = "env://", .group_name = "control", .timeout = kForever});
    if (rank == 0) {
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_EQ(error_of([&] { group.barrier().wait(); }).blame(), Blame::Timeout);
      EXPECT_GE(std::chrono::steady_clock::now() - begin, seconds(3));
    }
    other.barrier().wait();
    if (rank == 1) {
      // Rank 0 has done its part of the barrier, so this one may still pass; the next operation
      // fails.
      const auto error = error_of([&] {
        group.barrier().wait();
        group.barrier().wait();
      });
      EXPECT_NE(error.blame(), Blame::Caller) << error.text();
    }
    other.barrier().wait();
  });
  processes.expect_success();
}

}  // namespace
}  // namespace weft
