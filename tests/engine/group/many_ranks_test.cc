// SPDX-License-Identifier: Apache-2.0
// Many ranks, as processes that are forked from one, which has loaded libtorch and has no threads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::error_of;
using harness::Processes;

float sum_of_ones(ProcessGroup& group) {
  const auto ones = torch::ones({1000});
  group.all_reduce(ones).wait();
  EXPECT_EQ(ones.min().item<float>(), ones.max().item<float>());
  return ones[0].item<float>();
}

// A rank of a job, from which the victim is taken.
void run_rank(int rank, int ranks, int victim) {
  at::set_num_threads(1);
  // The harness takes a rank that runs for a minute for hanging; these may share two cores.
  if (ranks > 100) ::alarm(600);
  auto group = init_process_group({.backend = "tcp", .timeout = std::chrono::seconds(1000)});
  EXPECT_EQ(sum_of_ones(group), ranks);
  auto half = group.split(rank % 2, rank);
  EXPECT_EQ(sum_of_ones(half), (ranks + 1 - rank % 2) / 2);
  Processes::say("ready");
  if (rank == victim) {
    for (;;) ::pause();
  }
  const auto error = error_of([&] { group.barrier().wait(); });
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_EQ(error.ranks(), std::vector<int>{victim}) << error.what();
  EXPECT_NE(error.text().find("rank " + std::to_string(victim) + " is lost"), std::string::npos)
      << error.what();
  EXPECT_EQ(error.text().find(" has given up"), error.text().rfind(" has given up"))
      << "one rank after the other: " << error.text();
  auto survivors = group.new_group(group.living_ranks());
  ASSERT_EQ(survivors.size(), ranks - 1);
  EXPECT_EQ(sum_of_ones(survivors), ranks - 1);
  survivors.barrier().wait();
}

void lose_one(int ranks, int victim) {
  Processes processes(ranks, [=](int rank) { run_rank(rank, ranks, victim); });
  for (int rank = 0; rank < ranks; ++rank) processes.wait_for(rank, "ready");
  processes.signal(victim, SIGKILL);
  processes.expect_success({victim});
}

// The first rank hosts the store, and is the root of the tree.
TEST(ManyRanks, SixtyFourGoOnWithoutTheFirst) { lose_one(64, 0); }

TEST(ManyRanks, HundredsGoOnWithoutOne) {
  if (!harness::runs_all_settings()) GTEST_SKIP() << "./dev test --all runs this";
  lose_one(256, 3);
}

}  // namespace
}  // namespace weft
