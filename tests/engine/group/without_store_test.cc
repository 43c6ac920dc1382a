// SPDX-License-Identifier: Apache-2.0
// Ranks ask the job's store for little while they join. Afterwards they make groups without it, so
// its host may be lost.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/group.h>
#include <weft/mesh.h>
#include <weft/tests/harness/counted_store.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::CountedStore;

constexpr int kRanks = 4;

TEST(GroupsWithoutStore, AreMadeAfterJoining) {
  const auto store = c10::make_intrusive<CountedStore>(c10::make_intrusive<c10d::HashStore>());
  std::atomic<int> joined{0}, over{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      auto group = init_process_group(
          {.backend = "weft", .rank = rank, .world_size = kRanks, .store = store});
      const auto meet = [&](std::atomic<int>& count) {
        ++count;
        while (count < kRanks) std::this_thread::yield();
      };
      meet(joined);
      if (rank == 0) store->close();
      const auto requests = [&] { return store->requests() + store->looks(); };
      const int before = requests();
      const auto sum_of_ones = [](ProcessGroup& of) {
        const auto ones = torch::ones({10});
        of.all_reduce(ones).wait();
        return ones[9].item<float>();
      };
      auto some = group.new_group({3, 1});
      if (some) {
        EXPECT_EQ(sum_of_ones(some), 2);
        auto one = some.split(some.rank(), 0);
        EXPECT_EQ(sum_of_ones(one), 1);
      }
      auto half = group.split(rank % 2, -rank);
      EXPECT_EQ(half.rank(), 1 - rank / 2);
      EXPECT_EQ(sum_of_ones(half), 2);
      const Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
      auto shard = mesh["shard"];
      EXPECT_EQ(sum_of_ones(shard), 2);
      group.monitored_barrier(harness::kLimit);
      meet(over);
      EXPECT_EQ(requests(), before);
    });
  }
  for (auto& thread : ranks) thread.join();
}

// Returns the requests that a rank makes whether or not other ranks come late. Leaves out reads of
// the addresses of children that have published and not connected yet, and of some addresses of the
// mesh.
std::vector<std::string> asked_in_any_case(const CountedStore& store, int rank, int ranks) {
  std::vector<std::string> asked = store.asked();
  std::erase_if(asked, [&](const std::string& request) {
    constexpr std::string_view kMember = "weft/member/";
    if (const auto at = request.find(kMember); at != std::string::npos)
      return std::stoi(request.substr(at + kMember.size())) > rank;
    return request.find("multiGet") == 0 && !request.ends_with(" " + std::to_string(ranks - 1));
  });
  return asked;
}

class StoreRequests : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRanks, StoreRequests, testing::Values(2, 8, 64));

TEST_P(StoreRequests, JoiningMakesAtMostSixEach) {
  const int ranks = GetParam();
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<CountedStore>> stores;
  for (int rank = 0; rank < ranks; ++rank)
    stores.push_back(c10::make_intrusive<CountedStore>(shared));
  harness::run_threads(ranks, [&](int rank) {
    const auto& store = stores[static_cast<std::size_t>(rank)];
    auto group =
        init_process_group({.backend = "tcp", .rank = rank, .world_size = ranks, .store = store});
    const auto asked = asked_in_any_case(*store, rank, ranks);
    EXPECT_LE(asked.size(), 6U) << testing::PrintToString(asked);
    harness::meet(group);
  });
}

}  // namespace
}  // namespace weft
