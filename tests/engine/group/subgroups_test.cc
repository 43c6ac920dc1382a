// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/group/access.h>
#include <weft/group.h>
#include <weft/tests/harness/meet_in.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;

class Subgroups : public testing::TestWithParam<As> {
 protected:
  static void on_ranks(int ranks, const harness::Body& body) {
    harness::run_ranks(GetParam(), ranks, body);
  }
};

INSTANTIATE_TEST_SUITE_P(, Subgroups, testing::Values(As::Threads, As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// The job ranks in a group, in the group's order, gathered from its members.
std::vector<int> members_of(ProcessGroup& group, int job_rank) {
  const auto all = torch::zeros({group.size()}, at::kInt);
  group.all_gather_into(all, torch::full({1}, job_rank, at::kInt)).wait();
  return {all.data_ptr<int>(), all.data_ptr<int>() + all.numel()};
}

TEST_P(Subgroups, NewGroupKeepsTheGivenOrder) {
  on_ranks(4, [](ProcessGroup& group) {
    auto some = group.new_group({3, 0, 2});
    EXPECT_EQ(static_cast<bool>(some), group.rank() != 1);
    if (!some) return;
    EXPECT_EQ(some.size(), 3);
    EXPECT_EQ(some.rank(), group.rank() == 3 ? 0 : group.rank() == 0 ? 1 : 2);
    EXPECT_EQ(some.global_rank(some.rank()), group.rank());
    EXPECT_EQ(some.global_rank(0), 3);
    EXPECT_EQ(some.ranks(), (std::vector<int>{3, 0, 2}));
    EXPECT_EQ(members_of(some, group.rank()), (std::vector<int>{3, 0, 2}));
    EXPECT_EQ(error_of([&] { some.global_rank(3); }).blame(), Blame::Caller);
    const auto tensor = torch::full({1}, group.rank(), at::kInt);
    some.broadcast(tensor, 0).wait();
    EXPECT_EQ(tensor.item<int>(), 3) << "roots are ranks of the group";
  });
}

TEST_P(Subgroups, EqualMembersMakeSeparateGroups) {
  on_ranks(2, [](ProcessGroup& group) {
    auto one = group.new_group({0, 1});
    auto two = group.new_group({0, 1});
    const auto a = torch::full({1}, 1.0);
    const auto b = torch::full({1}, 10.0);
    // The order differs between the ranks, which is legal because the groups are different.
    Work first = group.rank() == 0 ? one.all_reduce(a) : two.all_reduce(b);
    Work second = group.rank() == 0 ? two.all_reduce(b) : one.all_reduce(a);
    first.wait();
    second.wait();
    EXPECT_EQ(a.item<float>(), 2);
    EXPECT_EQ(b.item<float>(), 20);
  });
}

TEST_P(Subgroups, RootsAreRanksOfTheGroup) {
  on_ranks(4, [](ProcessGroup& group) {
    auto turned = group.new_group({3, 2, 1, 0});
    const auto mine = [&] { return torch::full({2}, group.rank(), at::kInt); };
    for (int root = 0; root < 4; ++root) {
      const bool is_root = turned.rank() == root;
      const auto copied = mine();
      turned.broadcast(copied, root).wait();
      EXPECT_EQ(copied[1].item<int>(), 3 - root);
      const auto sum = mine();
      turned.reduce(sum, root).wait();
      EXPECT_EQ(sum[1].item<int>(), is_root ? 6 : group.rank());
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < 4 && is_root; ++rank) parts.push_back(torch::zeros({2}, at::kInt));
      turned.gather(parts, mine(), root).wait();
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        EXPECT_EQ(parts[rank][1].item<int>(), 3 - static_cast<int>(rank));
      }
      const auto part = torch::zeros({2}, at::kInt);
      turned.scatter(part, parts, root).wait();
      EXPECT_EQ(part[1].item<int>(), group.rank());
    }
  });
}

// As with PyTorch's use_local_synchronization: the other ranks do not call new_group, or have
// called it for another group before.
TEST_P(Subgroups, AreMadeByTheirMembersAlone) {
  on_ranks(4, [](ProcessGroup& group) {
    const int rank = group.rank();
    const std::vector<int> even{0, 2}, odd{1, 3};
    const auto& own = rank % 2 == 0 ? even : odd;
    EXPECT_FALSE(group.new_group(rank % 2 == 0 ? odd : even));
    auto half = group.new_group(own);
    EXPECT_EQ(half.rank(), rank / 2);
    EXPECT_EQ(half.ranks(), own);
    EXPECT_EQ(members_of(half, rank), own);
    if (rank != 0) {
      auto one = group.new_group({1, 2, 3}), two = group.new_group({1, 2, 3});
      const auto a = torch::full({1}, 1.0), b = torch::full({1}, 10.0);
      Work first = rank == 1 ? one.all_reduce(a) : two.all_reduce(b);
      Work second = rank == 1 ? two.all_reduce(b) : one.all_reduce(a);
      first.wait();
      second.wait();
      EXPECT_EQ(a.item<float>(), 3);
      EXPECT_EQ(b.item<float>(), 30);
    }
    EXPECT_EQ(members_of(group, rank), (std::vector<int>{0, 1, 2, 3}));
    // A failure of one group does not affect the others.
    harness::meet(group);
    if (rank == 0) half.abort("over");
    if (rank == 2) {
      EXPECT_EQ(error_of([&] { half.barrier().wait(); }).blame(), Blame::Cancelled);
    }
    harness::meet(group);
    if (rank % 2 == 1) {
      EXPECT_EQ(members_of(half, rank), odd);
    }
  });
}

TEST_P(Subgroups, NamesShowTheMembers) {
  on_ranks(1, [](ProcessGroup& group) {
    const auto name_of = [](ProcessGroup& of) {
      const std::string text =
          error_of([&] { static_cast<void>(of.broadcast(torch::ones({1}), 7)); }).text();
      const auto begin = text.find("group '") + 7;
      return text.substr(begin, text.find('\'', begin) - begin);
    };
    auto first = group.new_group({0}), second = group.new_group({0}, {.group_name = "of mine"});
    EXPECT_EQ(name_of(first), "default/0");
    EXPECT_EQ(name_of(second), "default/0#2.of mine");
  });
  if (GetParam() == As::Processes) return;
  on_ranks(8, [](ProcessGroup& group) {
    for (const auto& [ranks, name] : std::vector<std::pair<std::vector<int>, std::string>>{
             {{0, 1, 2, 3, 4, 5, 6, 7}, "default/0-7"},
             {{0, 2, 4, 6, 1, 3}, "default/0-6:2,1,3"},
             {{7, 6, 5, 0, 1}, "default/7-5:-1,0,1"}}) {
      auto made = group.new_group(ranks);
      if (!made) continue;
      const auto error = error_of([&] { static_cast<void>(made.broadcast(torch::ones({1}), 8)); });
      EXPECT_NE(error.text().find("group '" + name + "'"), std::string::npos) << error.text();
    }
  });
}

TEST_P(Subgroups, OptionsDoNotAffectTheParent) {
  on_ranks(2, [](ProcessGroup& group) {
    const c10::Device cpu(c10::kCPU);
    auto made = group.new_group({0, 1}, {.backend = "tcp", .timeout = std::chrono::seconds(2)});
    auto half = made.split(0, 0);
    EXPECT_EQ(made.backend(cpu), "tcp");
    EXPECT_EQ(half.backend(cpu), "tcp") << "inherited from its parent";
    EXPECT_EQ(group.backend(cpu), "weft");
    EXPECT_EQ(group.split(0, 0).backend(cpu), "weft");
    EXPECT_EQ(group.new_group({0, 1}).backend(cpu), "weft");
    for (ProcessGroup* one : {&made, &half}) {
      if (group.rank() == 0) {
        const auto error = error_of([&] { one->recv(torch::ones({1}), 1).wait(); });
        EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
        EXPECT_NE(error.text().find("2 s"), std::string::npos) << error.text();
      }
    }
    group.barrier().wait();
  });
}

TEST_P(Subgroups, BarrierFailsAfterItsOwnTimeout) {
  on_ranks(3, [](ProcessGroup& group) {
    constexpr auto kTimeout = std::chrono::seconds(2);
    auto pair = group.new_group({0, 2}, {.timeout = kTimeout});
    if (group.rank() == 0) {
      const auto begin = std::chrono::steady_clock::now();
      const auto error = error_of([&] { pair.barrier().wait(); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_GE(std::chrono::steady_clock::now() - begin, kTimeout);
    }
    group.barrier().wait();
  });
}

TEST_P(Subgroups, MayPartitionTheParent) {
  on_ranks(4, [](ProcessGroup& group) {
    const int rank = group.rank();
    auto pair = group.split(rank / 2, rank);
    EXPECT_EQ(members_of(pair, rank),
              rank < 2 ? (std::vector<int>{0, 1}) : (std::vector<int>{2, 3}));
    for (const auto& lists : {std::vector<std::vector<int>>{{0, 2}, {1, 3}}, {{3}, {0, 1, 2}}}) {
      std::vector<ProcessGroup> own;
      for (const auto& list : lists) {
        if (auto made = group.new_group(list)) own.push_back(made);
      }
      ASSERT_EQ(own.size(), 1U);
      EXPECT_EQ(members_of(own[0], rank), own[0].ranks());
    }
  });
}

TEST_P(Subgroups, GroupShrinksByLeavingOutRanks) {
  on_ranks(4, [](ProcessGroup& group) {
    ProcessGroup rest = group;
    for (const int out : {1, 2, 0}) {  // ranks of the remaining group: 1, 3 and 0 of the job
      std::vector<int> stay;
      for (int rank = 0; rank < rest.size(); ++rank) {
        if (rank != out) stay.push_back(rank);
      }
      const int expected = rest.size() - 1;
      rest = rest.new_group(stay);
      if (!rest) break;
      EXPECT_EQ(rest.size(), expected);
      const auto ones = torch::ones({1});
      rest.all_reduce(ones).wait();
      EXPECT_EQ(ones.item<float>(), static_cast<float>(expected));
    }
    EXPECT_EQ(static_cast<bool>(rest), group.rank() == 2);
    group.barrier().wait();
  });
}

TEST_P(Subgroups, SplitGroupsByColorAndOrdersByKey) {
  on_ranks(4, [](ProcessGroup& group) {
    auto half = group.split(group.rank() % 2, -group.rank());  // reversed
    ASSERT_TRUE(half);
    EXPECT_EQ(members_of(half, group.rank()),
              group.rank() % 2 == 0 ? (std::vector<int>{2, 0}) : (std::vector<int>{3, 1}));
    auto same_key = group.split(7, 0);
    EXPECT_EQ(members_of(same_key, group.rank()), (std::vector<int>{0, 1, 2, 3}));
    auto without_last = group.split(group.rank() == 3 ? -1 : 0, group.rank());
    EXPECT_EQ(static_cast<bool>(without_last), group.rank() != 3);
    if (without_last) {
      EXPECT_EQ(members_of(without_last, group.rank()), (std::vector<int>{0, 1, 2}));
    }
  });
}

TEST_P(Subgroups, MayBeMadeFromSubgroups) {
  on_ranks(4, [](ProcessGroup& group) {
    auto three = group.new_group({1, 2, 3});
    auto two = three ? three.new_group({2, 0}) : ProcessGroup();  // ranks 3 and 1 of the job
    if (two) {
      EXPECT_EQ(two.global_rank(0), 3);
      EXPECT_EQ(two.global_rank(1), 1);
      EXPECT_EQ(members_of(two, group.rank()), (std::vector<int>{3, 1}));
    }
    group.barrier().wait();
  });
}

TEST_P(Subgroups, OutliveTheirParents) {
  on_ranks(2, [](ProcessGroup& group) {
    const int rank = group.rank();
    auto pair = group.new_group({1, 0});
    group = ProcessGroup();
    EXPECT_EQ(members_of(pair, rank), (std::vector<int>{1, 0}));
    auto again = pair.new_group({1, 0});
    EXPECT_EQ(members_of(again, rank), (std::vector<int>{0, 1}));
  });
}

TEST_P(Subgroups, OutsidersDoNotWaitForMembers) {
  on_ranks(3, [](ProcessGroup& group) {
    if (group.rank() == 2) {
      EXPECT_FALSE(group.new_group({0, 1}));
      group.barrier().wait();  // the others enter it first
      return;
    }
    Work barrier = group.barrier();
    barrier.wait();
    auto pair = group.new_group({0, 1});
    EXPECT_EQ(members_of(pair, group.rank()), (std::vector<int>{0, 1}));
  });
}

TEST_P(Subgroups, MonitoredBarrierPassesIfAllCome) {
  on_ranks(3, [](ProcessGroup& group) {
    for (int i = 0; i < 3; ++i) group.monitored_barrier(std::chrono::seconds(20));
    auto pair = group.new_group({2, 0});
    if (pair) pair.monitored_barrier(std::chrono::seconds(20));
  });
}

TEST_P(Subgroups, MonitoredBarrierNamesAbsentRanks) {
  on_ranks(4, [](ProcessGroup& group) {
    if (group.rank() == 0) {
      group::store_of(group).get_all({"monitored/1/2"},
                                     Deadline::in(harness::kLimit));  // rank 2 has come
      const auto error = error_of([&] { group.monitored_barrier(std::chrono::milliseconds(300)); });
      EXPECT_EQ(error.blame(), Blame::Timeout);
      EXPECT_NE(error.text().find("ranks 1, 3 did not come within 300 ms"), std::string::npos)
          << error.text();
    } else if (group.rank() == 2) {
      const auto error = error_of([&] { group.monitored_barrier(std::chrono::seconds(20)); });
      EXPECT_EQ(error.blame(), Blame::Timeout);
      EXPECT_NE(error.text().find("rank 2 came"), std::string::npos) << error.text();
      EXPECT_NE(error.text().find("ranks 1, 3 did not come"), std::string::npos) << error.text();
    }
    group.barrier().wait();  // the failure breaks nothing
  });
}

TEST_P(Subgroups, MonitoredBarrierNamesAbsentRankZero) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 1) {
      const auto error = error_of([&] { group.monitored_barrier(std::chrono::milliseconds(50)); });
      EXPECT_EQ(error.blame(), Blame::Timeout);
      EXPECT_NE(error.text().find("rank 0 did not within 50 ms"), std::string::npos)
          << error.text();
    }
    group.barrier().wait();
  });
}

TEST_P(Subgroups, CountedRankHearsALateResult) {
  on_ranks(3, [](ProcessGroup& group) {
    const auto error_after = [&](int limit) {
      return error_of([&] { group.monitored_barrier(std::chrono::milliseconds(limit)); });
    };
    if (group.rank() == 1)
      static_cast<void>(error_after(50));  // it gives up before the others come
    group.barrier().wait();
    if (group.rank() == 2)
      group::store_of(group).get_all({"monitored/1/0"},
                                     Deadline::in(harness::kLimit));  // rank 0 has come
    if (group.rank() != 1) {
      const Error error = error_after(group.rank() == 0 ? 3000 : 300);
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("rank 1 did not come within 3"), std::string::npos)
          << error.text();
    }
    group.barrier().wait();
  });
}

TEST_P(Subgroups, ZeroTimeMonitoredBarrierFails) {
  on_ranks(3, [](ProcessGroup& group) {
    using std::chrono::milliseconds;
    if (group.rank() == 0) {
      group::store_of(group).get_all({"monitored/1/1", "monitored/1/2"},
                                     Deadline::in(harness::kLimit));  // both have come
      const auto error = error_of([&] { group.monitored_barrier(milliseconds(0)); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("ranks 1, 2 did not come within 0 ms"), std::string::npos)
          << error.text();
    } else {
      const auto error = error_of([&] { group.monitored_barrier(std::chrono::seconds(20)); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("rank " + std::to_string(group.rank()) + " came"),
                std::string::npos)
          << error.text();
    }
    group.barrier().wait();
    group.monitored_barrier(std::chrono::seconds(20));
    group.new_group({group.rank()})
        .monitored_barrier(milliseconds(0));  // a group of one is complete
  });
}

TEST_P(Subgroups, GivenUpBarrierIsNotCountedLater) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 1) {
      EXPECT_EQ(error_of([&] { group.monitored_barrier(std::chrono::milliseconds(50)); }).blame(),
                Blame::Timeout);
    }
    group.barrier().wait();
    if (group.rank() == 0) {
      const auto error = error_of([&] { group.monitored_barrier(std::chrono::milliseconds(100)); });
      EXPECT_NE(error.text().find("rank 1 did not come"), std::string::npos) << error.text();
    }
    group.barrier().wait();
    group.monitored_barrier(std::chrono::seconds(20));  // now both come
    EXPECT_EQ(error_of([&] { group.monitored_barrier(std::chrono::milliseconds(-5)); }).blame(),
              Blame::Caller);
  });
}

TEST_P(Subgroups, SkippedBarrierKeepsRanksInStep) {
  on_ranks(3, [](ProcessGroup& group) {
    if (group.rank() == 0)
      group::store_of(group).get_all({"monitored/1/1"},
                                     Deadline::in(harness::kLimit));  // rank 1 has come
    if (group.rank() != 2) {
      const auto limit = std::chrono::milliseconds(group.rank() == 0 ? 300 : 20'000);
      const auto error = error_of([&] { group.monitored_barrier(limit); });
      EXPECT_NE(error.text().find("rank 2 did not come"), std::string::npos) << error.text();
    }
    group.barrier().wait();
    for (int i = 0; i < 3; ++i) group.monitored_barrier(std::chrono::seconds(20));
  });
}

TEST(MonitoredBarrier, StoreKeysDoNotAccumulate) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  harness::run_threads(2, [&](int rank) {
    auto group = init_process_group(
        {.rank = rank, .world_size = 2, .store = store, .device = c10::Device(c10::kCPU)});
    harness::meet_in(group, store);
    std::vector<std::int64_t> keys;
    for (int round = 0; round < 6; ++round) {
      // One that fails on each rank, and one that passes.
      for (const int alone : {0, 1}) {
        if (rank == alone) {
          EXPECT_EQ(
              error_of([&] { group.monitored_barrier(std::chrono::milliseconds(10)); }).blame(),
              Blame::Timeout);
        }
        group.barrier().wait();
      }
      group.monitored_barrier(std::chrono::seconds(20));
      group.barrier().wait();
      keys.push_back(store->getNumKeys());
      group.barrier().wait();
    }
    EXPECT_EQ(keys[5], keys[2]) << "from " << keys[0];
  });
}

// A store that shows a rank that the other has come to a monitored barrier, and delays its next
// step until the other has given up.
class GivenUpInBetween final : public c10d::HashStore {
 public:
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    // Weft reads a key without waiting for it by this call: a missing key has the expected value.
    auto value = HashStore::compareSet(key, expected, desired);
    if (value == expected || !key.ends_with("monitored/1/1")) return value;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return given_up_; });
    return value;
  }
  void give_up() {
    std::lock_guard lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_up_ = false;
};

TEST(MonitoredBarrier, GivingUpDuringTheCheckTimesOut) {
  const auto store = c10::make_intrusive<GivenUpInBetween>();
  harness::run_threads(2, [&](int rank) {
    auto group = init_process_group(
        {.rank = rank, .world_size = 2, .store = store, .device = c10::Device(c10::kCPU)});
    harness::meet_in(group, store);
    const auto error = error_of(
        [&] { group.monitored_barrier(std::chrono::milliseconds(rank == 0 ? 1000 : 300)); });
    if (rank == 1) store->give_up();
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    group.barrier().wait();
    group.monitored_barrier(std::chrono::seconds(20));
  });
}

TEST(MonitoredBarrier, ThreadsOfOneRankTakeTurns) {
  harness::run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < 10; ++round) group.monitored_barrier(std::chrono::seconds(20));
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(Subgroups, RefusedNewGroupKeepsRanksInStep) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 1) {
      EXPECT_EQ(error_of([&] { group.new_group({0, 0}); }).blame(), Blame::Caller);
      EXPECT_EQ(error_of([&] {
                  group.new_group({0, 1}, {.backend = "cpu:gloo,"});
                }).blame(),
                Blame::Caller);
    }
    auto pair = group.new_group({0, 1});
    EXPECT_EQ(members_of(pair, group.rank()), (std::vector<int>{0, 1}));
  });
}

TEST_P(Subgroups, CallsWithADepartedRankFail) {
  on_ranks(3, [](ProcessGroup& group) {
    if (group.rank() == 2) return;
    const std::vector<std::function<void()>> calls{
        [&] { group.split(0, 0); },
        [&] {
          group.new_group({0, 1, 2});
        },
        [&] { group.monitored_barrier(std::chrono::hours(1)); },
    };
    for (const auto& call : calls) {
      const auto error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      EXPECT_NE(error.text().find("rank 2 has left group"), std::string::npos) << error.text();
    }
    auto pair = group.new_group({0, 1});
    pair.monitored_barrier(std::chrono::seconds(20));
  });
}

TEST_P(Subgroups, DifferentBackendsAreRefused) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto error = error_of([&] {
      group.new_group({0, 1}, {.backend = group.rank() == 0 ? "gloo" : "tcp"});
    });
    EXPECT_EQ(error.blame(), group.rank() == 0 ? Blame::PeerLost : Blame::Caller) << error.what();
    const std::string text = "rank 0 has backend 'gloo' for cpu tensors, rank 1 has 'tcp'";
    EXPECT_NE(error.text().find(text), std::string::npos) << error.text();
    group.barrier().wait();
  });
}

// The ranks are different processes, and inproc reaches none of them.
TEST(NewGroup, RankThatCannotConnectTellsOthers) {
  harness::run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    const auto error = error_of([&] { group.new_group({0, 1}, {.backend = "inproc"}); });
    // A rank that is told of the other's error before it finds its own says that the other is lost.
    EXPECT_TRUE(error.blame() == Blame::Unsupported || error.blame() == Blame::PeerLost)
        << error.what();
    EXPECT_NE(error.text().find("in another process"), std::string::npos) << error.text();
    group.barrier().wait();
  });
}

// Names in the table of addresses, as rank 0's, one that takes connections and never answers.
class Misleading final : public c10d::HashStore {
 public:
  Misleading() {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof name;
    auto* const address = reinterpret_cast<sockaddr*>(&name);
    EXPECT_EQ(::bind(silent_, address, size), 0);
    EXPECT_EQ(::listen(silent_, 8), 0);
    EXPECT_EQ(::getsockname(silent_, address, &size), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(name.sin_port));
  }
  ~Misleading() override { ::close(silent_); }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    constexpr std::ptrdiff_t kFront = 8;  // as in transport/mesh/table.h, before the address
    std::string text(value.begin(), value.end());
    if (key.ends_with("mesh/address/0")) known_ = with_length(text.substr(kFront));
    if (key.ends_with("mesh/table")) {
      const std::size_t at = text.find(known_);
      EXPECT_NE(at, std::string::npos);
      if (at != std::string::npos) text.replace(at, known_.size(), with_length(address_));
    }
    HashStore::set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    for (std::size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
  }
  const std::string& address() const { return address_; }

 private:
  // As the table has it: the number of its bytes in two bytes, the lower one first.
  static std::string with_length(const std::string& address) {
    const std::size_t bytes = address.size();
    return std::string{static_cast<char>(bytes % 256), static_cast<char>(bytes / 256)} + address;
  }

  const int silent_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string address_;
  std::string known_;  // rank 0's address as the table has it
};

TEST(Joining, UnreachableAddressIsNamed) {
  const auto store = c10::make_intrusive<Misleading>();
  harness::run_threads(2, [&](int rank) {
    const auto error = error_of([&] {
      init_process_group({.backend = "tcp",
                          .rank = rank,
                          .world_size = 2,
                          .store = store,
                          .timeout = std::chrono::seconds(1 + 20 * (1 - rank)),
                          .device = c10::Device(c10::kCPU)});
    });
    if (rank == 0) return;
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    for (const std::string& words :
         {"cannot connect (tcp) to " + store->address(), std::string("WEFT_SOCKET_IFNAME there"),
          std::string("ProcessGroupOptions::backend")}) {
      EXPECT_NE(error.text().find(words), std::string::npos) << error.text();
    }
  });
}

TEST_P(Subgroups, BadBackendIsRefusedOnEveryRank) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto error = error_of([&] { group.new_group({0}, {.backend = "cpu:gloo,cpu:gloo"}); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    group.barrier().wait();
  });
}

TEST_P(Subgroups, StoresOfGroupsAreSeparate) {
  on_ranks(2, [](ProcessGroup& group) {
    auto pair = group.new_group({0, 1});
    if (group.rank() == 0) {
      group.store()->set("key", std::string("of the parent"));
      pair.store()->set("key", std::string("of the pair"));
    }
    group.barrier().wait();
    const auto text = [](const std::vector<std::uint8_t>& bytes) {
      return std::string(bytes.begin(), bytes.end());
    };
    EXPECT_EQ(text(group.store()->get("key")), "of the parent");
    EXPECT_EQ(text(pair.store()->get("key")), "of the pair");
    group.barrier().wait();
  });
}

}  // namespace
}  // namespace weft
