// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"

namespace weft::testing {
namespace {

class Averaging : public ::testing::TestWithParam<harness::As> {};
INSTANTIATE_TEST_SUITE_P(As, Averaging,
                         ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

TEST_P(Averaging, LeavesTheMeanOnEveryRank) {
  for (const char* backend : {"gloo", "shm", "tcp"}) {
    harness::run_ranks(GetParam(), 3,
                       [](ProcessGroup group) {
                         const double rank = group.rank();
                         const std::vector<torch::Tensor> parameters{
                             torch::full({3}, rank, torch::kFloat).requires_grad_(),
                             torch::full({2, 2}, 10 * rank, torch::kDouble),
                             torch::arange(6, torch::kDouble)
                                 .view({2, 3})
                                 .t()
                                 .mul(rank)
                                 .requires_grad_(),  // its columns are contiguous
                             torch::full({}, 2 * rank, torch::kFloat),
                             torch::empty({0}, torch::kFloat)};
                         average_parameters(parameters, group);
                         EXPECT_TRUE(torch::all(parameters[0] == 1).item<bool>());
                         EXPECT_TRUE(torch::all(parameters[1] == 10).item<bool>());
                         EXPECT_TRUE(torch::equal(
                             parameters[2], torch::arange(6, torch::kDouble).view({2, 3}).t()));
                         EXPECT_EQ(parameters[3].item<float>(), 2);
                         EXPECT_TRUE(parameters[0].is_leaf() && parameters[0].requires_grad());
                       },
                       {.backend = backend});
  }
}

TEST_P(Averaging, BadParameterErrorNamesItsIndex) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    for (const auto& wrong :
         {torch::Tensor(), torch::eye(2).to_sparse(), torch::ones({1}).expand({2}),
          torch::ones({2}, torch::kLong), torch::ones({2}, torch::kBool)}) {
      const auto error = harness::error_of([&] {
        average_parameters({torch::ones({2}), wrong}, group);
      });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("average_parameters: parameter 1"));
    }
  });
}

// Counts the host memory that this thread allocates and frees.
struct Allocated : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                         c10::Device) override {
    now += bytes;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t now = 0;
  std::int64_t most = 0;
};

TEST(AveragingOfALargeModel, NeedsLessExtraMemoryThanItsSize) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    constexpr std::int64_t kPiece = 25 << 20;
    std::vector<torch::Tensor> parameters;
    for (int i = 0; i < 8; ++i)
      parameters.push_back(torch::full({kPiece / 4}, i + 2.0F * group.rank()));
    const auto allocated = std::make_shared<Allocated>();
    {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocated);
      average_parameters(parameters, group);
    }
    EXPECT_GE(allocated->most, kPiece);
    EXPECT_LT(allocated->most, 7 * kPiece);  // other threads' frees are not counted
    for (int i = 0; i < 8; ++i)
      EXPECT_TRUE(torch::all(parameters[static_cast<std::size_t>(i)] == i + 1).item<bool>());
  });
}

TEST_P(Averaging, EqualsOneProcessWithTheWholeBatch) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    Mlp plain;
    fill(plain);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    for (std::uint64_t step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      torch::mse_loss(net(part(random({8, 6}, step), group.rank(), 2)),
                      part(random({8, 3}, 50 + step), group.rank(), 2))
          .backward();
      optimizer.step();
      average_parameters(net->parameters(), group);
      plain_optimizer.zero_grad();
      torch::mse_loss(plain(random({8, 6}, step)), random({8, 3}, 50 + step)).backward();
      plain_optimizer.step();
      EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-10) << "step " << step;
    }
  });
}

TEST(AveragingInASubgroup, OutsidersKeepTheirValues) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup group) {
    const auto pair = group.new_group({0, 2});
    const auto value = torch::full({1}, 1.0 + group.rank());
    average_parameters({value}, pair);
    EXPECT_EQ(value.item<float>(), 2);  // (1 + 3) / 2, and rank 1's own
  });
}

TEST(PeriodicAverager, AveragesEachPeriodAfterTheWarmUp) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    PeriodicAverager averager(group, {.period = 3, .warmup_steps = 2});
    std::vector<int> averaged;
    for (int step = 0; step < 10; ++step) {
      const auto value = torch::full({1}, group.rank() * 2.0);
      const bool now = averager.average_parameters({value});
      EXPECT_EQ(value.item<float>(), now ? 1 : 2 * group.rank()) << "step " << step;
      if (now) averaged.push_back(step);
    }
    EXPECT_THAT(averaged, ::testing::ElementsAre(2, 5, 8));
    EXPECT_EQ(averager.steps(), 10);
  });
}

TEST(PeriodicAverager, PeriodBelowOneIsACallerError) {
  EXPECT_EQ(harness::error_of([] { PeriodicAverager({}, {.period = 0}); }).blame(), Blame::Caller);
  EXPECT_EQ(
      harness::error_of([] { PeriodicAverager({}, {.period = 1, .warmup_steps = -1}); }).blame(),
      Blame::Caller);
}

}  // namespace
}  // namespace weft::testing
