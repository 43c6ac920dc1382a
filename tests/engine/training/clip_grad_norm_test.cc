// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/utils/clip_grad.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"
#include "shards.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Holds parameters of these values, whose gradients are the same values.
struct Values : torch::nn::Module {
  explicit Values(const std::vector<torch::Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      auto parameter = register_parameter("p" + std::to_string(i), values[i].clone());
      parameter.mutable_grad() = values[i].clone();
    }
  }
};
std::shared_ptr<Values> model_of(const std::vector<torch::Tensor>& values) {
  return std::make_shared<Values>(values);
}

TEST(ClipGradNorm, EqualsLibtorchs) {
  for (const double norm_type : {1.0, 2.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.5, 1e6}) {
      Mlp net, same;
      fill(net);
      fill(same);
      const auto batch = random({4, 6}, 3);
      net(batch).square().sum().backward();
      same(batch).square().sum().backward();
      const auto norm = clip_grad_norm_(*net, max_norm, norm_type);
      const double expected =
          torch::nn::utils::clip_grad_norm_(same->parameters(), max_norm, norm_type);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-9 * expected) << norm_type;
      EXPECT_LT(difference(gradients(*net), gradients(*same)), 1e-9) << norm_type;
    }
  }
}

TEST(ClipGradNorm, CountsASharedWeightOnce) {
  struct Net : torch::nn::Module {
    Net() {
      const auto weight = register_parameter("weight", torch::ones({4}));
      register_module("inner", std::make_shared<torch::nn::Module>())
          ->register_parameter("weight", weight);
      weight.mutable_grad() = torch::full({4}, 3.0);
    }
  } net;
  EXPECT_EQ(clip_grad_norm_(net, 3).item<float>(), 6);
  EXPECT_NEAR(net.parameters()[0].grad()[0].item<float>(), 1.5, 1e-5);
}

TEST(ClipGradNorm, SumsEqualEntriesOfSparseGradients) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 1).sparse(true));
  net(torch::tensor({1, 1, 1, 3, 3, 3, 3})).sum().backward();
  EXPECT_EQ(clip_grad_norm_(*net, 2.5).item<float>(), 5);
  EXPECT_TRUE(torch::allclose(net->weight.grad().to_dense().view(-1),
                              torch::tensor({0.F, 1.5F, 0.F, 2.F})));
}

TEST(ClipGradNorm, TakesSeveralDtypes) {
  const auto net =
      model_of({torch::full({1}, 3.0, torch::kFloat), torch::full({1}, 4.0, torch::kDouble)});
  EXPECT_EQ(clip_grad_norm_(*net, 1).item<double>(), 5);
  EXPECT_NEAR(net->parameters()[0].grad().item<double>(), 0.6, 1e-6);
  EXPECT_NEAR(net->parameters()[1].grad().item<double>(), 0.8, 1e-6);
}

TEST(ClipGradNorm, IsZeroWithoutGradients) {
  Mlp net;
  EXPECT_EQ(clip_grad_norm_(*net, 1).item<float>(), 0);
  EXPECT_FALSE(net->parameters()[0].grad().defined());
}

TEST(ClipGradNorm, InfAndNanAreNoErrors) {
  const auto infinite = model_of({torch::tensor({1.0, kInfinity})});
  EXPECT_EQ(clip_grad_norm_(*infinite, 1).item<double>(), kInfinity);
  EXPECT_EQ(infinite->parameters()[0].grad()[0].item<double>(), 0);
  EXPECT_TRUE(std::isnan(infinite->parameters()[0].grad()[1].item<double>()));
  for (const double norm_type : {2.0, kInfinity}) {
    const auto undefined = model_of({torch::tensor({1.0, kNan})});
    EXPECT_TRUE(std::isnan(clip_grad_norm_(*undefined, 1, norm_type).item<double>()));
  }
}

TEST(ClipGradNorm, WrongNumbersAreSentences) {
  Mlp net;
  for (const auto& [max_norm, norm_type, text] :
       {std::tuple{-1.0, 2.0, "max_norm is -1"}, std::tuple{kNan, 2.0, "max_norm is"},
        std::tuple{1.0, 0.0, "norm_type is 0"}, std::tuple{1.0, kNan, "norm_type is"}}) {
    const auto error = harness::error_of(
        [&, max = max_norm, type = norm_type] { clip_grad_norm_(*net, max, type); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr(text));
  }
}

TEST(ClipGradNorm, BehindDdpEqualsOneProcess) {
  for (const double norm_type : {2.0, kInfinity}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      Mlp net, plain;
      fill(net);
      fill(plain);
      DistributedDataParallel ddp(net, group);
      const auto batch = random({4, 6}, 5);
      ddp(part(batch, group.rank(), 2)).square().sum().backward();
      (plain(batch).square().sum() / 2).backward();
      const auto norm = clip_grad_norm_(*net, 0.1, norm_type);
      const auto expected = clip_grad_norm_(*plain, 0.1, norm_type);
      EXPECT_NEAR(norm.item<double>(), expected.item<double>(), 1e-9);
      EXPECT_LT(difference(gradients(*net), gradients(*plain)), 1e-9);
      auto largest = norm.detach().clone(), smallest = norm.detach().clone();
      group.all_reduce(largest, ReduceOp::Max).wait();
      group.all_reduce(smallest, ReduceOp::Min).wait();
      EXPECT_TRUE(torch::equal(largest, smallest));
    });
  }
}

// Each rank has a part of what `whole` has on one rank.
void expect_as_whole(
    const std::function<torch::Tensor(ProcessGroup, const torch::nn::Module&, double)>& clip) {
  for (const double norm_type : {1.0, 2.0, kInfinity}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      const auto values = random({6, 3}, 7), more = random({4}, 8);
      const auto whole = model_of({values, more});
      const auto expected = clip_grad_norm_(*whole, 0.5, norm_type);
      const auto mine = model_of({part(values, group.rank(), 2), part(more, group.rank(), 2)});
      const auto norm = clip(group, *mine, norm_type);
      EXPECT_NEAR(norm.item<double>(), expected.item<double>(), 1e-9);
      EXPECT_LT(
          difference(gradients(*mine), {part(whole->parameters()[0].grad(), group.rank(), 2),
                                        part(whole->parameters()[1].grad(), group.rank(), 2)}),
          1e-9);
    });
  }
}

TEST(ClipGradNorm, AddsUpShards) {
  expect_as_whole([](ProcessGroup group, const torch::nn::Module& mine, double norm_type) {
    const AllAreShards shards(group);
    return clip_grad_norm_(mine, 0.5, norm_type);
  });
}

TEST(ClipGradNorm, AddsUpRanksWithOtherParameters) {
  expect_as_whole([](ProcessGroup group, const torch::nn::Module& mine, double norm_type) {
    return clip_grad_norm_(mine, 0.5, norm_type, group);
  });
}

TEST(ClipGradNorm, NanOfOneRankIsThatOfAll) {
  for (const double norm_type : {2.0, kInfinity}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      const auto net = model_of({torch::full({2}, group.rank() == 0 ? kNan : 1.0)});
      EXPECT_TRUE(std::isnan(clip_grad_norm_(*net, 1, norm_type, group).item<double>()));
    });
  }
}

// The last shard of a small parameter has no rows, and a rank may have used no parameter.
TEST(ClipGradNorm, RanksWithoutGradientsTakePart) {
  for (const double norm_type : {2.0, kInfinity}) {
    for (const bool is_empty : {true, false}) {
      harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
        const AllAreShards shards(group);
        const auto net = model_of({torch::full({group.rank() == 1 && is_empty ? 0 : 1, 1}, 3.0)});
        if (group.rank() == 1 && !is_empty) net->parameters()[0].mutable_grad() = torch::Tensor();
        EXPECT_EQ(clip_grad_norm_(*net, 1, norm_type).item<double>(), 3);
      });
    }
  }
}

}  // namespace
}  // namespace weft::testing
