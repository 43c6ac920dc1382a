// SPDX-License-Identifier: Apache-2.0
// The plans of all ranks, executed against each other in one thread and in random order: every part
// is expected by its receiver, no step waits for ever, and the result is that of the collective.
#include <bit>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include <gmock/gmock.h>

#include <weft/transport/mesh/algorithms.h>

namespace weft::transport::mesh {
namespace {

using Bytes = std::vector<std::byte>;

// One rank with its memory, all of it 32-bit integers.
struct Member {
  std::vector<std::int32_t> data;
  std::vector<std::vector<std::int32_t>> inputs, outputs;
  std::vector<Slice> input_slices, output_slices;
  Plan plan;
  Scratch scratch;
};

Slice slice_of(std::vector<std::int32_t>& numbers) {
  return {numbers.data(), numbers.size() * 4, Device::host()};
}

// Connections of minimal capacity: a message blocks the next one until it has been received, and a
// send is done when its message has been received.
class World {
 public:
  World(int ranks, unsigned seed) : members(static_cast<std::size_t>(ranks)), random_(seed) {}

  void plan(const Call& call, const Choice& choice) {
    for (int rank = 0; rank < ranks(); ++rank) {
      Member& member = of(rank);
      for (auto& input : member.inputs) member.input_slices.push_back(slice_of(input));
      for (auto& output : member.outputs) member.output_slices.push_back(slice_of(output));
      const Job job{.call = call,
                    .rank = rank,
                    .ranks = ranks(),
                    .data = slice_of(member.data),
                    .inputs = member.input_slices,
                    .outputs = member.output_slices};
      write(member.plan, job, choice, member.scratch);
    }
  }

  // Runs until no step can run any more.
  void run() {
    for (int rank = 0; rank < ranks(); ++rank) {
      for (Plan::Index i = 0; i < of(rank).plan.steps().size(); ++i) {
        if (of(rank).plan.steps()[i].waits_for == 0) release(rank, i);
      }
    }
    for (auto turns = turns_that_can(); !turns.empty(); turns = turns_that_can()) {
      const auto [from, to] = turns[random_() % turns.size()];
      take(from, to);
    }
  }

  void expect_all_done() {
    for (int rank = 0; rank < ranks(); ++rank) {
      for (const Plan::Step& step : of(rank).plan.steps()) {
        ASSERT_EQ(step.state, Plan::State::Done)
            << "rank " << rank << " step with rank " << step.peer << " number " << step.number;
      }
    }
  }

  int ranks() const { return static_cast<int>(members.size()); }
  Member& of(int rank) { return members[static_cast<std::size_t>(rank)]; }
  std::vector<Member> members;

 private:
  void release(int rank, Plan::Index index) {
    Plan::Step& step = of(rank).plan.steps()[index];
    if (step.action == Plan::Action::Send) {
      step.state = Plan::State::Started;
      queues_[{rank, step.peer}].push_back(index);
    } else if (step.action == Plan::Action::Copy) {
      if (step.bytes > 0) std::memmove(step.data, step.from, step.bytes);
      done(rank, index);
    }
  }

  void done(int rank, Plan::Index index) {
    Plan& plan = of(rank).plan;
    plan.steps()[index].state = Plan::State::Done;
    for (Plan::Index link = plan.steps()[index].first_link; link != Plan::kNone;
         link = plan.links()[link].next) {
      const Plan::Index later = plan.links()[link].step;
      if (--plan.steps()[later].waits_for == 0) release(rank, later);
    }
  }

  std::vector<std::pair<int, int>> turns_that_can() {
    std::vector<std::pair<int, int>> turns;
    for (auto& [link, queue] : queues_) {
      if (queue.empty()) continue;
      const Plan::Step& sent = of(link.first).plan.steps()[queue.front()];
      Plan::Step* const expected = of(link.second).plan.expected(link.first, sent.number);
      if (expected == nullptr || expected->state != Plan::State::Waiting ||
          expected->bytes != sent.bytes) {
        ADD_FAILURE() << "rank " << link.second << " does not expect part " << sent.number << " of "
                      << sent.bytes << " bytes from rank " << link.first;
        return {};
      }
      if (expected->waits_for == 0) turns.push_back(link);
    }
    return turns;
  }

  void take(int from, int to) {
    auto& queue = queues_[{from, to}];
    const Plan::Index sent = queue.front();
    queue.erase(queue.begin());
    const Plan::Step& source = of(from).plan.steps()[sent];
    Plan& plan = of(to).plan;
    Plan::Step& target = *plan.expected(from, source.number);
    if (target.action == Plan::Action::Fold) {
      plan.folds()[target.fold].add(source.data, plan.arithmetic, of(to).scratch);
    } else if (target.bytes > 0) {
      std::memcpy(target.data, source.data, target.bytes);
    }
    done(from, sent);
    done(to, plan.index_of(target));
  }

  std::map<std::pair<int, int>, std::vector<Plan::Index>> queues_;
  std::mt19937 random_;
};

std::int32_t number(int rank, std::size_t index) {
  return 1000 * (rank + 1) + static_cast<std::int32_t>(index % 997);
}

std::vector<std::int32_t> numbers_of(int rank, std::size_t count, std::size_t first = 0) {
  std::vector<std::int32_t> numbers(count);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = number(rank, first + i);
  return numbers;
}

std::vector<std::int32_t> sum_of(int ranks, std::size_t count, std::size_t first = 0) {
  std::vector<std::int32_t> sum(count, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += number(rank, first + i);
  }
  return sum;
}

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

Call call_of(Kind kind, std::size_t count, int root = 0) {
  return {
      .kind = kind, .dtype = Dtype::Int32, .op = ReduceOp::Sum, .root = root, .bytes = count * 4};
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
