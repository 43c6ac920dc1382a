// SPDX-License-Identifier: Apache-2.0
// The layers SyncBatchNorm1d, 2d and 3d.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "batch_norms.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using torch::nn::BatchNormOptions;

template <class Layer>
MakeLayer layers() {
  return [](const BatchNormOptions& options, ProcessGroup group) {
    Layer layer(options, group);
    return BatchNormUnderTest{[layer](torch::Tensor input) mutable { return layer(input); },
                              layer.ptr()};
  };
}
void expect_1d(const BatchNormCase& item) {
  expect_as_one_process<torch::nn::BatchNorm1d>(item, layers<SyncBatchNorm1d>());
}

TEST(SyncBatchNorm, EqualsOneProcessInAllDimensions) {
  expect_1d({});
  expect_1d({.shape = {4, 3}});
  expect_as_one_process<torch::nn::BatchNorm2d>({.shape = {4, 3, 2}}, layers<SyncBatchNorm2d>());
  expect_as_one_process<torch::nn::BatchNorm3d>({.shape = {4, 3, 2, 2}}, layers<SyncBatchNorm3d>());
}

TEST(SyncBatchNorm, BatchesMayDifferAndBeEmpty) {
  expect_1d({.rows = {5, 1, 2}});
  expect_1d({.rows = {4, 0}});
  expect_1d({.rows = {1, 1}});
}

TEST(SyncBatchNorm, FollowsItsOptions) {
  expect_1d({.options = BatchNormOptions(4).momentum(0.3).eps(0.1)});
  expect_1d({.options = BatchNormOptions(4).momentum(std::nullopt)});
  expect_1d({.options = BatchNormOptions(4).affine(false)});
  expect_1d({.options = BatchNormOptions(4).track_running_stats(false)});
  expect_1d({.options = BatchNormOptions(4).affine(false).track_running_stats(false)});
}

TEST(SyncBatchNorm, OneRankIsLibtorchsLayer) { expect_1d({.rows = {5}}); }

TEST(SyncBatchNorm, FrozenWeightsAndInputsHaveNoGradient) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    SyncBatchNorm1d layer(BatchNormOptions(2), group);
    layer->weight.set_requires_grad(false);
    layer(torch::randn({3, 2})).sum().backward();
    EXPECT_FALSE(layer->weight.grad().defined());
    EXPECT_EQ(layer->bias.grad()[0].item<float>(), 3);
  });
}

// The variance of float32 values around 10^4, which their squares in float32 would not hold.
TEST(SyncBatchNorm, LargeMeansKeepTheVariance) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    SyncBatchNorm1d layer(BatchNormOptions(1), group);
    const auto batch = random({64, 1}, 1) + 10000;
    const auto output = layer(part(batch, group.rank(), 2).to(torch::kFloat));
    const auto exact = (batch - batch.mean()) / batch.var(/*unbiased=*/false).sqrt();
    EXPECT_LT((output - part(exact, group.rank(), 2)).abs().max().item<double>(), 5e-3);
  });
}

TEST(SyncBatchNorm, HalfPrecisionInputsHaveFloatStatistics) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      SyncBatchNorm2d layer(BatchNormOptions(3), group);
      torch::nn::BatchNorm2d whole(BatchNormOptions(3));
      const auto batch = random({4, 3, 5, 5}, 1).to(dtype);
      auto own = part(batch, group.rank(), 2).requires_grad_();
      const auto output = layer(own);
      EXPECT_EQ(output.scalar_type(), dtype);
      const auto expected = part(whole(batch.to(torch::kFloat)), group.rank(), 2);
      EXPECT_TRUE(torch::allclose(output.to(torch::kFloat), expected, 0.02, 0.02));
      EXPECT_TRUE(torch::allclose(layer->running_var, whole->running_var));
      output.sum().backward();
      EXPECT_EQ(own.grad().scalar_type(), dtype);
      EXPECT_EQ(layer->weight.grad().scalar_type(), torch::kFloat);
    });
  }
}

TEST(SyncBatchNorm, KeepsTheMemoryFormat) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    SyncBatchNorm2d layer(BatchNormOptions(3), group);
    const auto input = torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
    EXPECT_TRUE(layer(input).is_contiguous(at::MemoryFormat::ChannelsLast));
  });
}

TEST(SyncBatchNorm, BatchesThatAreAllEmptyGiveNoNan) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    SyncBatchNorm1d layer(BatchNormOptions(2), group);
    auto input = torch::zeros({0, 2}).requires_grad_();
    layer(input).sum().backward();
    EXPECT_TRUE(torch::equal(layer->running_var, torch::ones({2})));
    EXPECT_TRUE(torch::equal(layer->running_mean, torch::zeros({2})));
    EXPECT_TRUE(torch::equal(layer->weight.grad(), torch::zeros({2})));
  });
}

TEST(SyncBatchNorm, WrongCallsAreSentences) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const auto expect = [](const std::function<void()>& call, const char* text) {
      const auto error = harness::error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(text));
    };
    SyncBatchNorm1d one(BatchNormOptions(2), group);
    SyncBatchNorm2d two(BatchNormOptions(2), group);
    expect(
        [&] {
          one(torch::zeros({2, 3}));
        },
        "the input has the shape [2, 3]; it must have 2 or 3 dimensions and 2 channels");
    expect([&] { two(torch::zeros({2, 2})); }, "it must have 4 dimensions");
    expect([] { SyncBatchNorm1d(BatchNormOptions(2), ProcessGroup()); }, "the group is empty");
    const auto loss = one(torch::randn({3, 2}).requires_grad_()).square().sum();
    expect([&] { loss.backward({}, true, /*create_graph=*/true); }, "create_graph");
    std::ostringstream text;
    text << *two;
    EXPECT_EQ(text.str(), "weft::SyncBatchNorm2d(2, eps=1e-05, ranks=2)");
  });
}

TEST(SyncBatchNorm, InAJoinIsRefusedOnceARankHasRunOut) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    SyncBatchNorm1d layer(BatchNormOptions(2), group);
    DistributedDataParallel ddp(layer, group);
    const auto error = harness::error_of([&] {
      join(ddp, [&] {
        for (int step = 0; step < (group.rank() == 0 ? 1 : 3); ++step)
          ddp(torch::randn({4, 2})).square().sum().backward();
      });
    });
    if (group.rank() == 1)
      EXPECT_THAT(error.text(), HasSubstr("SyncBatchNorm: some ranks have run out of inputs"));
  });
}

}  // namespace
}  // namespace weft::testing
