// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/autocast_mode.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

torch::Dtype dtype_of_a_product() {
  const auto matrix = torch::ones({4, 4});
  return torch::mm(matrix, matrix).scalar_type();
}

TEST(Autocast, ComputesInItsDtypeWhileItLives) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    {
      const AutocastGuard autocast(torch::kCPU, dtype);
      EXPECT_EQ(dtype_of_a_product(), dtype);
    }
    EXPECT_EQ(dtype_of_a_product(), torch::kFloat);
  }
}

TEST(Autocast, InnerRegionMayBeOff) {
  const AutocastGuard outer(torch::kCPU, torch::kBFloat16);
  {
    const AutocastGuard off(torch::kCPU, torch::kBFloat16, false);
    EXPECT_EQ(dtype_of_a_product(), torch::kFloat);
    const AutocastGuard innermost(torch::kCPU, torch::kHalf);
    EXPECT_EQ(dtype_of_a_product(), torch::kHalf);
  }
  EXPECT_EQ(dtype_of_a_product(), torch::kBFloat16);
}

TEST(Autocast, ExceptionsRestoreWhatWasSet) {
  try {
    const AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    throw std::runtime_error("thrown");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(dtype_of_a_product(), torch::kFloat);
}

TEST(Autocast, OtherThreadsComputeAsUsual) {
  const AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
  auto dtype = torch::kBFloat16;
  std::thread([&] { dtype = dtype_of_a_product(); }).join();
  EXPECT_EQ(dtype, torch::kFloat);
}

TEST(Autocast, NextRegionSeesWhatTheOptimizerChanged) {
  torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
  const auto output = [&] {
    const AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    return net(torch::ones({1, 2})).item<float>();
  };
  {
    const torch::NoGradGuard no_grad;
    net->weight.fill_(1);
  }
  EXPECT_EQ(output(), 2);
  {
    const torch::NoGradGuard no_grad;
    net->weight.fill_(3);
  }
  EXPECT_EQ(output(), 6);
}

TEST(Autocast, AveragesInTheDtypeOfTheParameters) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(3, 2);
    fill(net);
    DistributedDataParallel ddp(net, group);
    torch::Tensor output;
    {
      const AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
      output = ddp(torch::full({1, 3}, group.rank() + 1.0));
    }
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    output.sum().backward();
    EXPECT_TRUE(torch::equal(net->weight.grad(), torch::full({2, 3}, 1.5)));
  });
}

TEST(Autocast, WrongArgumentsAreSentences) {
  auto error = harness::error_of([] { const AutocastGuard guard(torch::kCPU, torch::kDouble); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("Double is no dtype of autocast"));
  error = harness::error_of([] { const AutocastGuard guard(torch::kFPGA, torch::kHalf); });
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_EQ(dtype_of_a_product(), torch::kFloat);
}

}  // namespace
}  // namespace weft::testing
