// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/transport/mpi/agreement.h>

namespace weft::transport::mpi {
namespace {

using std::chrono::microseconds;

// Runs each rank on its own thread with its own deadline; returns how many were let in.
int let_in(const std::vector<Deadline>& deadlines, int ranks) {
  harness::MemoryBootstrap store;
  std::atomic<int> begun{0};
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < deadlines.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        agree_to_begin(store, static_cast<int>(rank), ranks, deadlines[rank]);
        ++begun;
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return begun;
}

TEST(AgreementToBegin, LetsAllInOnceAllHaveCome) {
  EXPECT_EQ(let_in({Deadline::never(), Deadline::never(), Deadline::never()}, 3), 3);
  EXPECT_EQ(let_in({Deadline::in(microseconds(0))}, 1), 1);
}

TEST(AgreementToBegin, LetsNobodyInIfOneIsMissing) {
  EXPECT_EQ(let_in({Deadline::in(microseconds(1000)), Deadline::never()}, 3), 0)
      << "a rank was let in though one never came";
}

TEST(AgreementToBegin, RefusesARankAfterOthersGaveUp) {
  harness::MemoryBootstrap store;
  const auto come = [&](int rank) {
    try {
      agree_to_begin(store, rank, 2,
                     Deadline::in(rank == 0 ? microseconds(0) : std::chrono::seconds(100)));
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Timeout);
      return error.text();
    }
    return std::string("let in");
  };
  EXPECT_NE(come(0), "let in");
  EXPECT_EQ(come(1), "rank 0 reached its deadline before all ranks had joined");
}

// The deadlines pass at about the moment when the last rank comes.
TEST(AgreementToBegin, LetsInAllOrNone) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<Deadline> deadlines;
    for (int rank = 0; rank < 3; ++rank)
      deadlines.push_back(Deadline::in(microseconds(random() % 300)));
    const int begun = let_in(deadlines, 3);
    EXPECT_TRUE(begun == 0 || begun == 3) << begun;
  }
}

}  // namespace
}  // namespace weft::transport::mpi
