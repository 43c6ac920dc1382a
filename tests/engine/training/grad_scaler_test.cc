// SPDX-License-Identifier: Apache-2.0
// GradScaler: its states, and that ranks leave out the same steps.
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"
#include "shards.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::SGD;

constexpr float kOverflow = std::numeric_limits<float>::infinity();

torch::Tensor parameter(double value = 1) { return torch::full({2}, value).requires_grad_(); }

void scaled_backward(GradScaler& scaler, const torch::Tensor& parameter, double gradient = 1) {
  scaler.scale((parameter * gradient).sum()).backward();
}

void expect_caller(const std::function<void()>& call, const std::string& text) {
  const auto error = harness::error_of(call);
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr(text));
}

TEST(GradScaler, StepsWithTheUnscaledGradients) {
  auto weight = parameter();
  SGD optimizer({weight}, 0.5);
  GradScaler scaler;
  const auto loss = (weight * 3).sum();
  EXPECT_EQ(scaler.scale(loss).item<float>(), 6 * 65536);
  scaler.scale(loss).backward();
  EXPECT_EQ(weight.grad()[0].item<float>(), 3 * 65536);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(weight.grad()[0].item<float>(), 3);
  EXPECT_EQ(weight[0].item<float>(), -0.5);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 65536);
}

TEST(GradScaler, InfAndNanLeaveOutTheStep) {
  for (const float bad : {kOverflow, -kOverflow, std::numeric_limits<float>::quiet_NaN()}) {
    auto weight = parameter();
    SGD optimizer({weight}, 0.5);
    GradScaler scaler({.init_scale = 1024});
    scaled_backward(scaler, weight, bad);
    EXPECT_FALSE(scaler.step(optimizer));
    EXPECT_EQ(weight[0].item<float>(), 1);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 512);
  }
}

TEST(GradScaler, GrowsAfterTheInterval) {
  auto weight = parameter();
  SGD optimizer({weight}, 0.0);
  GradScaler scaler({.init_scale = 8, .growth_factor = 4, .growth_interval = 3});
  std::vector<double> scales;
  for (const double gradient : {1.0, 1.0, double{kOverflow}, 1.0, 1.0, 1.0}) {
    optimizer.zero_grad();
    scaled_backward(scaler, weight, gradient);
    scaler.step(optimizer);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_THAT(scales, ::testing::ElementsAre(8, 8, 4, 4, 4, 16));
}

TEST(GradScaler, GradientsMayBeClippedBetween) {
  auto weight = parameter();
  SGD optimizer({weight}, 1.0);
  GradScaler scaler;
  scaled_backward(scaler, weight, 3);
  scaler.unscale_(optimizer);
  EXPECT_EQ(weight.grad()[1].item<float>(), 3);
  weight.mutable_grad().fill_(2);
  EXPECT_TRUE(scaler.step(optimizer));  // does not divide again
  EXPECT_EQ(weight[1].item<float>(), -1);
}

TEST(GradScaler, UpdateLooksAtAllOptimizers) {
  auto good = parameter(), bad = parameter();
  SGD first({good}, 1.0), second({bad}, 1.0);
  GradScaler scaler({.init_scale = 4});
  for (const auto& loss : scaler.scale(std::vector{good.sum(), (bad * kOverflow).sum()}))
    loss.backward();
  EXPECT_TRUE(scaler.step(first));
  EXPECT_FALSE(scaler.step(second));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
  EXPECT_EQ(good[0].item<float>(), 0);
}

TEST(GradScaler, CallsOutOfOrderAreSentences) {
  auto weight = parameter();
  SGD optimizer({weight}, 1.0), without({parameter()}, 1.0);
  GradScaler scaler;
  expect_caller([&] { scaler.unscale_(optimizer); }, "unscale_() is called before scale()");
  expect_caller([&] { scaler.step(optimizer); }, "step() is called before scale()");
  expect_caller([&] { scaler.update(); }, "update() is called before scale()");
  scaled_backward(scaler, weight);
  expect_caller([&] { scaler.update(); },
                "call scaler.step(optimizer) in place of optimizer.step()");
  scaler.unscale_(optimizer);
  expect_caller([&] { scaler.unscale_(optimizer); },
                "unscale_() has already been called on this optimizer since the last update()");
  scaler.step(optimizer);
  expect_caller([&] { scaler.step(optimizer); },
                "step() has already been called on this optimizer since the last update()");
  expect_caller([&] { scaler.unscale_(optimizer); }, "unscale_() is being called after step()");
  expect_caller([&] { scaler.step(without); }, "none of whose parameters has a gradient");
  scaler.update();
  optimizer.zero_grad();
  scaled_backward(scaler, weight);
  EXPECT_TRUE(scaler.step(optimizer));
}

TEST(GradScaler, OptionsOutsideTheirRangesAreSentences) {
  expect_caller([] { GradScaler({.init_scale = 0}); }, "init_scale is 0");
  expect_caller([] { GradScaler({.growth_factor = 1}); }, "growth_factor is 1");
  expect_caller([] { GradScaler({.backoff_factor = 1}); }, "backoff_factor is 1");
  expect_caller([] { GradScaler({.growth_interval = 0}); }, "growth_interval is 0");
  GradScaler scaler;
  scaled_backward(scaler, parameter());
  expect_caller([&] { scaler.update(-1); }, "a scale must be positive");
  scaler.update(32);
  EXPECT_EQ(scaler.get_scale(), 32);
}

TEST(GradScaler, Float16GradientsAreRefused) {
  auto weight = torch::ones({2}, torch::kHalf).requires_grad_();
  SGD optimizer({weight}, 1.0);
  GradScaler scaler({.init_scale = 2});
  scaled_backward(scaler, weight);
  expect_caller([&] { scaler.step(optimizer); }, "attempting to unscale float16 gradients");
}

TEST(GradScaler, SwitchedOffItOnlySteps) {
  auto weight = parameter();
  SGD optimizer({weight}, 1.0);
  GradScaler scaler({.enabled = false});
  const auto loss = weight.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(weight[0].item<float>(), 0);
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.is_enabled());
}

TEST(GradScaler, UnscalesSparseGradients) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  SGD optimizer(net->parameters(), 1.0);
  GradScaler scaler({.init_scale = 64});
  scaler.scale(net(torch::tensor({1, 1, 3})).sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(torch::equal(net->weight.grad().to_dense().select(1, 0),
                           torch::tensor({0.F, 2.F, 0.F, 1.F})));
}

TEST(GradScaler, CheckpointKeepsScaleAndOptions) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    const harness::Folder folder;
    const std::string file = folder.path() + "/run.pt";
    auto weight = parameter();
    SGD optimizer({weight}, 0.0);
    const auto step = [&](GradScaler& scaler) {
      optimizer.zero_grad();
      scaled_backward(scaler, weight);
      scaler.step(optimizer);
      scaler.update();
    };
    GradScaler saved({.init_scale = 8, .growth_factor = 4, .growth_interval = 2});
    step(saved);
    checkpoint::save(file, group, {{"scaler", saved}});
    GradScaler loaded;
    checkpoint::load(file, group, {{"scaler", loaded}});
    EXPECT_EQ(loaded.get_scale(), 8);
    EXPECT_EQ(loaded.get_growth_factor(), 4);
    EXPECT_EQ(loaded.get_growth_interval(), 2);
    step(loaded);  // the second of two
    EXPECT_EQ(loaded.get_scale(), 32);
  });
}

class GradScalerOfRanks : public ::testing::TestWithParam<harness::As> {};
INSTANTIATE_TEST_SUITE_P(As, GradScalerOfRanks,
                         ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// Only rank 1's batch overflows float16; the average is infinite on both.
TEST_P(GradScalerOfRanks, LeaveOutTheSameStepsBehindDdp) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
    fill(net);
    const auto before = net->weight.detach().clone();
    DistributedDataParallel ddp(net, group);
    SGD optimizer(net->parameters(), 0.5);
    GradScaler scaler({.init_scale = 1024});
    const auto step = [&](double input) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const AutocastGuard autocast(torch::kCPU, torch::kHalf);
        loss = ddp(torch::full({1, 2}, input)).sum();
      }
      scaler.scale(loss).backward();
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    EXPECT_FALSE(step(group.rank() == 1 ? 60000 : 1));
    EXPECT_TRUE(torch::equal(net->weight, before));
    EXPECT_EQ(scaler.get_scale(), 512);
    EXPECT_TRUE(step(1));
    EXPECT_TRUE(torch::allclose(net->weight, before - 0.5));
  });
}

TEST(GradScaler, RanksWithOtherParametersAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto weight = parameter();
    SGD optimizer({weight}, 1.0);
    GradScaler scaler({.init_scale = 2}, group);
    scaled_backward(scaler, weight, group.rank() == 1 ? kOverflow : 1);
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 1);
    optimizer.zero_grad(/*set_to_none=*/true);
    if (group.rank() == 0) {
      scaled_backward(scaler, weight);
    } else {
      scaler.scale(torch::ones({}));  // no gradient on this rank
    }
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_EQ(weight[0].item<float>(), group.rank() == 0 ? 0 : 1);
  });
}

TEST(GradScaler, RanksOfAZeroOptimizerAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto one = parameter(), other = parameter();
    ZeroRedundancyOptimizer<SGD> zero(std::vector{one, other}, group,
                                      torch::optim::SGDOptions(1.0));
    GradScaler scaler({.init_scale = 2});
    scaler.scale((one * (group.rank() == 1 ? kOverflow : 1)).sum() + other.sum()).backward();
    EXPECT_FALSE(scaler.step(zero));
    scaler.update();
    zero.zero_grad();
    scaler.scale(one.sum() + other.sum()).backward();
    EXPECT_TRUE(scaler.step(zero));
    EXPECT_EQ(one[0].item<float>(), 0);
    EXPECT_EQ(other[0].item<float>(), 0);
  });
}

TEST(GradScaler, OverlappedZeroIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, torch::optim::SGDOptions(1.0));
    zero.overlap_with(ddp);
    GradScaler scaler;
    scaler.scale(ddp(random({2, 6}, 1)).sum()).backward();
    expect_caller([&] { scaler.step(zero); }, "overlap_with() makes steps during backward");
    zero.step();
  });
}

TEST(GradScaler, RanksOfShardsAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const AllAreShards shards(group);
    auto weight = parameter();
    SGD optimizer({weight}, 1.0);
    GradScaler scaler;
    scaled_backward(scaler, weight, group.rank() == 0 ? kOverflow : 1);
    EXPECT_FALSE(scaler.step(optimizer));
  });
}

}  // namespace
}  // namespace weft::testing
