// SPDX-License-Identifier: Apache-2.0
// A rank is killed at a random instant, in the middle of operations of all ranks. All that the
// others wait for, and every later call, names the dead rank; no result before was wrong.
#include <deque>
#include <random>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/group_of_the_living.h>
#include <weft/tests/harness/hosts.h>
#include <weft/tests/harness/killed_anywhen.h>

namespace weft {
namespace {

using harness::error_of;
using harness::group_of_the_living;
using harness::Hosts;
using harness::Processes;

constexpr int kRanks = 4;
// Longer than each rank may run (harness::kLimit), so no error here is this timeout.
constexpr std::chrono::seconds kNeverExpires{1000};

// Issues the same operations on all ranks, some at a time.
class Stream {
 public:
  Stream(ProcessGroup& group, int seed) : group_(group), random_(static_cast<unsigned>(seed)) {}

  [[noreturn]] void run() {
    for (;;) {
      begin();
      if (pending_.size() > static_cast<std::size_t>(below(4))) end();
    }
  }

 private:
  struct Pending {
    Work work;
    at::Tensor result;
    double expected = 0;
  };
  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }
  void keep(Work work, at::Tensor result, double expected) {
    pending_.push_back({std::move(work), std::move(result), expected});
  }
  void begin() {
    constexpr std::int64_t kSizes[] = {1, 1000, 30'000, 500'000};
    const auto size = kSizes[below(4)];
    const int root = below(kRanks);
    const int rank = group_.rank();
    const auto mine = torch::full({size}, rank + 1.0);
    constexpr double kSum = kRanks * (kRanks + 1) / 2;
    switch (below(7)) {
      case 0: keep(group_.all_reduce(mine), mine, kSum); break;
      case 1: keep(group_.broadcast(mine, root), mine, root + 1.0); break;
      case 2:
        keep(group_.reduce(mine, root), rank == root ? mine : torch::full({1}, kSum), kSum);
        break;
      case 3: {
        auto all = torch::zeros({kRanks * size});
        keep(group_.all_gather_into(all, mine), all.narrow(0, root * size, size), root + 1.0);
        break;
      }
      case 4: {
        auto part = torch::zeros({size});
        keep(group_.reduce_scatter_into(part, mine.repeat({kRanks})), part, kSum);
        break;
      }
      case 5: {
        // Each rank sends as much to each; between hosts short parts share a message.
        auto parts = torch::zeros({kRanks * size});
        const auto work = group_.all_to_all_single(parts, mine.repeat({kRanks}));
        keep(work, parts.narrow(0, root * size, size), root + 1.0);
        break;
      }
      default: {
        auto from_last = torch::zeros({size});
        const int last = (rank + kRanks - 1) % kRanks;
        keep(group_.send(mine, (rank + 1) % kRanks), mine, rank + 1.0);
        keep(group_.recv(from_last, last), from_last, last + 1.0);
      }
    }
  }
  void end() {
    auto& [work, result, expected] = pending_.front();
    work.wait();
    const auto [least, most] = result.aminmax();
    EXPECT_EQ(least.item<double>(), expected);
    EXPECT_EQ(most.item<double>(), expected);
    pending_.pop_front();
  }

  ProcessGroup& group_;
  std::mt19937 random_;
  std::deque<Pending> pending_;
};

// A rank of Stream, until the victim is killed and the others have made a group of their own.
void run_rank(int rank, int victim, const ProcessGroupOptions& options, int seed) {
  at::set_num_threads(1);
  auto group = init_process_group(options);
  group.barrier().wait();
  Processes::say("ready");
  const auto expect_lost = [&](const std::function<void()>& call) {
    const auto error = error_of(call);
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_EQ(error.ranks(), std::vector<int>{victim}) << error.text();
    const std::string named = "rank " + std::to_string(victim) + " is lost";
    EXPECT_EQ(error.text().find(named), error.text().rfind(named))
        << "named twice: " << error.text();
  };
  expect_lost([&] { Stream(group, seed).run(); });
  expect_lost([&] { group.all_reduce(torch::ones({1})).wait(); });
  expect_lost([&] { group.send(torch::ones({1}), (rank + 1) % kRanks).wait(); });
  // Whichever rank it was: the store's host, or the root of membership's tree.
  auto survivors = group.new_group(group.living_ranks());
  ASSERT_EQ(survivors.size(), kRanks - 1);
  const auto sum = torch::full({1000}, rank + 1.0);
  survivors.all_reduce(sum).wait();
  constexpr double kSum = kRanks * (kRanks + 1) / 2;
  EXPECT_EQ(sum.min().item<double>(), kSum - (victim + 1));
  EXPECT_EQ(sum.max().item<double>(), kSum - (victim + 1));
  auto half = survivors.split(survivors.rank() % 2, 0);
  half.barrier().wait();
}

// Rank 0, which hosts the store and is the root of membership's tree, in each third case; the
// others in turns.
int victim_of(int seed) {
  const int others = seed - seed / 3 - 1;  // cases before this one whose victim is another rank
  return seed % 3 == 0 ? 0 : 1 + others % (kRanks - 1);
}

class KilledAnywhen : public testing::TestWithParam<harness::KilledCase> {};

TEST_P(KilledAnywhen, IsNamedToAllOthers) {
  const auto& [backend, seed] = GetParam();
  const int victim = victim_of(seed);
  const ProcessGroupOptions options{.backend = backend, .timeout = kNeverExpires};
  Processes ranks(kRanks,
                  [options, seed, victim](int rank) { run_rank(rank, victim, options, seed); });
  harness::kill_anywhen(ranks, kRanks, victim, seed, std::chrono::milliseconds(200));
}

INSTANTIATE_TEST_SUITE_P(Group, KilledAnywhen,
                         testing::Combine(testing::Values("gloo", "shm", "tcp"),
                                          testing::Range(0, 4)),
                         harness::killed_name);
INSTANTIATE_TEST_SUITE_P(Default, KilledAnywhen,
                         testing::Combine(testing::Values("weft"),
                                          testing::Range(0,
                                                         harness::runs_all_settings() ? 300 : 5)),
                         harness::killed_name);

class KilledOnTwoHosts : public testing::TestWithParam<int> {};

// Ranks 0 and 1 share a host, and 2 and 3: collectives have two levels.
TEST_P(KilledOnTwoHosts, IsNamedToAllOthers) {
  const Hosts hosts(2);
  if (!hosts.why_not().empty()) GTEST_SKIP() << hosts.why_not();
  const int seed = GetParam(), victim = victim_of(seed);
  Processes ranks(kRanks, [&hosts, seed, victim](int rank) {
    if (!hosts.enter(rank / 2)) return Processes::say("not permitted");
    Processes::say("there");
    harness::unset_rank_variables();
    ProcessGroupOptions options{.backend = "weft", .timeout = kNeverExpires};
    options.init_method = "tcp://" + Hosts::address(0) + ":29577";
    options.world_size = kRanks;
    options.rank = rank;
    run_rank(rank, victim, options, seed);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    if (ranks.next_word(rank) != "there") GTEST_SKIP() << Hosts::kMayNotEnter;
  }
  harness::kill_anywhen(ranks, kRanks, victim, seed, std::chrono::milliseconds(200));
}

INSTANTIATE_TEST_SUITE_P(Default, KilledOnTwoHosts,
                         testing::Range(0, harness::runs_all_settings() ? 100 : 3));

class KilledTwice : public testing::TestWithParam<harness::KilledCase> {};

// The second rank is killed while the others learn of the first, or make their group.
TEST_P(KilledTwice, OthersMakeAGroup) {
  const auto& [backend, seed] = GetParam();
  const int first = victim_of(seed), second = (first + 1 + seed / 2 % (kRanks - 1)) % kRanks;
  Processes ranks(kRanks, [backend, seed, first, second](int rank) {
    at::set_num_threads(1);
    auto group = init_process_group({.backend = backend, .timeout = kNeverExpires});
    group.barrier().wait();
    Processes::say("ready");
    const Error lost = error_of([&] { Stream(group, seed).run(); });
    EXPECT_EQ(lost.blame(), Blame::PeerLost) << lost.what();
    for (;;) {
      auto made = group_of_the_living(group);
      try {
        const auto sum = torch::full({1000}, rank + 1.0);
        made.all_reduce(sum).wait();
        // The second victim may have taken part before.
        if (made.size() > kRanks - 2) {
          error_of([&] {
            for (;;) made.barrier().wait();
          });
          continue;
        }
        EXPECT_EQ(sum.min().item<double>(), kRanks * (kRanks + 1) / 2 - (first + 1) - (second + 1));
        return;
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
        if (error.blame() != Blame::PeerLost) return;
      }
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) ranks.wait_for(rank, "ready");
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  ranks.signal(first, SIGKILL);
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
  ranks.signal(second, SIGKILL);
  ranks.expect_success({first, second});
}

INSTANTIATE_TEST_SUITE_P(Default, KilledTwice,
                         testing::Combine(testing::Values("weft"),
                                          testing::Range(0,
                                                         harness::runs_all_settings() ? 100 : 3)),
                         harness::killed_name);

}  // namespace
}  // namespace weft
