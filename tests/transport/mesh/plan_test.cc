// SPDX-License-Identifier: Apache-2.0
// The plans of all ranks, executed against each other in one thread and in random order: every part
// is expected by its receiver, no step waits for ever, and the result is that of the collective.
#include <bit>
#include <random>

#include <gmock/gmock.h>

#include <weft/tests/transport/mesh/plan_world.h>

namespace weft::transport::mesh {
namespace {

// Calls check(ranks, elements, chunk bytes, seed) for sizes around those at which plans are cut.
template <class Check>
void for_all_sizes(const Check& check) {
  constexpr std::size_t kChunk = 64;  // 16 numbers
  for (const int ranks : {2, 3, 4, 5, 7, 8, 9, 12, 16}) {
    for (const std::size_t count : {0u, 1u, 2u, 15u, 16u, 17u, 33u, 160u, 161u, 1000u, 2048u}) {
      for (unsigned seed = 0; seed < 3; ++seed) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(count) +
                     " numbers, seed " + std::to_string(seed));
        check(ranks, count, kChunk, seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

class Reduces : public testing::TestWithParam<Algorithm> {};

TEST_P(Reduces, AllReduceSumsOnEveryRank) {
  for_all_sizes([](int ranks, std::size_t count, std::size_t chunk, unsigned seed) {
    World world(ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, count);
    world.plan(call_of(Kind::AllReduce, count), {GetParam(), chunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank)
      ASSERT_EQ(world.of(rank).data, sum_of(ranks, count)) << "rank " << rank;
  });
}

// If ranks rounded differently, they would drift apart: every algorithm must give all ranks the
// same bits.
TEST_P(Reduces, FloatsHaveTheSameBitsOnEveryRank) {
  for (const int ranks : {2, 3, 6, 8, 13}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    constexpr std::size_t kCount = 777;
    World world(ranks, 5);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<double> mean(kCount, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = 0; i < kCount; ++i) {
        const float value = normal(random);
        mean[i] += static_cast<double>(value) / ranks;
        world.of(rank).data.push_back(std::bit_cast<std::int32_t>(value));
      }
    }
    Call call = call_of(Kind::AllReduce, kCount);
    call.dtype = Dtype::Float32;
    call.op = ReduceOp::Avg;
    world.plan(call, {GetParam(), 256});
    world.run();
    world.expect_all_done();
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_NEAR(std::bit_cast<float>(world.of(0).data[i]), mean[i], 1e-6) << "number " << i;
    }
    for (int rank = 1; rank < ranks; ++rank)
      ASSERT_EQ(world.of(rank).data, world.of(0).data) << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, Reduces,
                         testing::Values(Algorithm::Direct, Algorithm::Blocks, Algorithm::Ring,
                                         Algorithm::Doubling, Algorithm::Halving));

class Broadcasts : public testing::TestWithParam<Algorithm> {};

TEST_P(Broadcasts, CopiesTheRootsNumbersToAll) {
  for_all_sizes([](int ranks, std::size_t count, std::size_t chunk, unsigned seed) {
    const int root = static_cast<int>(seed) % ranks;
    World world(ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, count);
    world.plan(call_of(Kind::Broadcast, count, root), {GetParam(), chunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank)
      ASSERT_EQ(world.of(rank).data, numbers_of(root, count)) << "rank " << rank;
  });
}

INSTANTIATE_TEST_SUITE_P(Plans, Broadcasts,
                         testing::Values(Algorithm::Direct, Algorithm::Tree, Algorithm::Blocks));

class ReducesToRoot : public testing::TestWithParam<Algorithm> {};

TEST_P(ReducesToRoot, ChangesOnlyTheRootsNumbers) {
  for_all_sizes([](int ranks, std::size_t count, std::size_t chunk, unsigned seed) {
    const int root = ranks - 1 - static_cast<int>(seed) % ranks;
    World world(ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) world.of(rank).data = numbers_of(rank, count);
    world.plan(call_of(Kind::Reduce, count, root), {GetParam(), chunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(world.of(rank).data, rank == root ? sum_of(ranks, count) : numbers_of(rank, count))
          << "rank " << rank;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Plans, ReducesToRoot,
                         testing::Values(Algorithm::Direct, Algorithm::Blocks));

TEST(Plans, ReduceScatterTakesUnequalParts) {
  for_all_sizes([](int ranks, std::size_t count, std::size_t chunk, unsigned seed) {
    const auto size_of_part = [&](int part) {
      return part % 3 == 1 ? 0 : count / static_cast<std::size_t>(part + 1);
    };
    World world(ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int part = 0; part < ranks; ++part) {
        world.of(rank).inputs.push_back(
            numbers_of(rank, size_of_part(part), static_cast<std::size_t>(part)));
      }
      world.of(rank).data.resize(size_of_part(rank));
    }
    world.plan(call_of(Kind::ReduceScatter, count), {Algorithm::Blocks, chunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(world.of(rank).data,
                sum_of(ranks, size_of_part(rank), static_cast<std::size_t>(rank)))
          << "rank " << rank;
    }
  });
}

class Gathers : public testing::TestWithParam<Algorithm> {};

TEST_P(Gathers, GivesEveryRankAllParts) {
  for_all_sizes([](int ranks, std::size_t count, std::size_t chunk, unsigned seed) {
    World world(ranks, seed);
    for (int rank = 0; rank < ranks; ++rank) {
      world.of(rank).data = numbers_of(rank, count);
      world.of(rank).outputs.assign(static_cast<std::size_t>(ranks),
                                    std::vector<std::int32_t>(count));
    }
    world.plan(call_of(Kind::AllGather, count), {GetParam(), chunk});
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < ranks; ++rank) {
      for (int other = 0; other < ranks; ++other) {
        ASSERT_EQ(world.of(rank).outputs[static_cast<std::size_t>(other)], numbers_of(other, count))
            << "rank " << rank;
      }
    }
  });
}

TEST(Plans, LargeGathersGoInChunksThatCanBeLent) {
  constexpr std::size_t kFrom = (4 << 20) / sizeof(std::int32_t);  // a rank's numbers
  constexpr std::size_t kLongestInRing = 1 << 20;                  // bytes; longer chunks are lent
  for (const std::size_t count : {kFrom - 1, kFrom, kFrom + 1, 2 * kFrom - 1}) {
    const Call call = call_of(Kind::AllGather, count);
    const Choice choice = choose_in_cache(call, arithmetic_of(call.dtype, call.op, 3), 3);
    EXPECT_EQ(choice.chunk_bytes > kLongestInRing, count >= kFrom) << count;
    World world(3, 0);
    for (int rank = 0; rank < 3; ++rank) {
      world.of(rank).data = numbers_of(rank, count);
      world.of(rank).outputs.assign(3, std::vector<std::int32_t>(count));
    }
    world.plan(call, choice);
    world.run();
    world.expect_all_done();
    for (int rank = 0; rank < 3; ++rank) {
      for (int other = 0; other < 3; ++other) {
        ASSERT_TRUE(world.of(rank).outputs[static_cast<std::size_t>(other)] ==
                    numbers_of(other, count))
            << "rank " << rank;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, Gathers, testing::Values(Algorithm::Direct, Algorithm::Ring));

class Barriers : public testing::TestWithParam<Algorithm> {};

TEST_P(Barriers, WaitForEveryRank) {
  for (int ranks = 2; ranks <= 17; ++ranks) {
    World all(ranks, 0);
    all.plan({.kind = Kind::Barrier}, {GetParam()});
    all.run();
    all.expect_all_done();
    for (int late = 0; late < ranks; ++late) {
      World world(ranks, 0);
      world.plan({.kind = Kind::Barrier}, {GetParam()});
      // One rank never enters: no rank may pass.
      for (Plan::Step& step : world.of(late).plan.steps()) ++step.waits_for;
      world.run();
      for (int rank = 0; rank < ranks; ++rank) {
        const auto& steps = world.of(rank).plan.steps();
        const bool passed = std::all_of(steps.begin(), steps.end(), [](const Plan::Step& step) {
          return step.state == Plan::State::Done;
        });
        EXPECT_FALSE(passed) << "rank " << rank << " of " << ranks << " passed without rank "
                             << late;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, Barriers, testing::Values(Algorithm::Direct, Algorithm::Tree));

TEST(Plans, EveryChosenPlanCompletes) {
  for (const int ranks : {2, 3, 8, 9, 40}) {
    for (const std::size_t count : {0u, 1u, 1000u, 20'000u}) {
      for (int kind = 0; kind <= static_cast<int>(Kind::Barrier); ++kind) {
        World world(ranks, 0);
        for (int rank = 0; rank < ranks; ++rank) {
          Member& member = world.of(rank);
          member.data = numbers_of(rank, count);
          member.inputs.assign(static_cast<std::size_t>(ranks),
                               numbers_of(rank, count / static_cast<std::size_t>(ranks)));
          member.outputs = member.inputs;
          if (static_cast<Kind>(kind) == Kind::ReduceScatter ||
              static_cast<Kind>(kind) == Kind::Scatter) {
            member.data.resize(member.inputs[0].size());
          }
          if (static_cast<Kind>(kind) == Kind::AllGather ||
              static_cast<Kind>(kind) == Kind::Gather) {
            member.data.resize(member.outputs[0].size());
          }
        }
        Call call = call_of(static_cast<Kind>(kind), count);
        for (const auto& chooser : {choose, choose_in_cache}) {
          world.plan(call, chooser(call, arithmetic_of(call.dtype, call.op, ranks), ranks));
          world.run();
          world.expect_all_done();
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::transport::mesh
