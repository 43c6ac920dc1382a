// SPDX-License-Identifier: Apache-2.0
// What OnMeta and materialize() take for granted of libtorch. If one of these tests fails with a
// new release of libtorch, engine/shard/meta_tensors.cc has to follow that release.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/library.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <weft/engine/shard/meta_tensors.h>
#include <weft/fully_shard.h>
#include <weft/tests/harness/ranks.h>

namespace weft::shard {
namespace {

void keep_all(const c10::OperatorHandle& called, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::DeferredInit);
  called.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::DeferredInit),
      stack);
}

// First, since later tests register Weft's own functions in the process, and it forks.
TEST(MetaTensorsOfAnotherLibrary, AreRefusedWithASentence) {
  harness::run_ranks(harness::As::Processes, 1, [](ProcessGroup&) {
    torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, "here", 1);
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&keep_all>());
    const Error error = harness::error_of([] { const OnMeta on_meta; });
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    EXPECT_THAT(error.text(), ::testing::HasSubstr("which another library of this process uses"));
    EXPECT_TRUE(torch::empty({2}).is_cpu());
  });
}

TEST(MetaTensors, FunctionsThatMakeTensorsMakeThemOnMeta) {
  const torch::Tensor here = torch::ones({2});
  const OnMeta on_meta;
  EXPECT_TRUE(torch::empty({2}).is_meta());
  EXPECT_TRUE(torch::zeros({2}, torch::kInt).is_meta());
  EXPECT_TRUE(torch::randn({2, 3}).is_meta());
  EXPECT_TRUE(torch::arange(4).is_meta());
  EXPECT_TRUE(torch::full({2}, 1.5).is_meta());
  EXPECT_TRUE(torch::eye(3).is_meta());
  EXPECT_TRUE((torch::arange(4).view({2, 2}) + torch::ones({2})).is_meta());
}

TEST(MetaTensors, ANamedDeviceAndAGivenTensorCount) {
  const torch::Tensor here = torch::ones({2});
  const OnMeta on_meta;
  EXPECT_TRUE(torch::empty({2}, torch::kCPU).is_cpu());
  EXPECT_TRUE(torch::zeros_like(here).is_cpu());
  EXPECT_TRUE(here.new_empty({3}).is_cpu());
  EXPECT_TRUE(torch::tensor({1, 2}).is_cpu());
  EXPECT_TRUE(here.to(torch::kDouble).is_cpu());
}

TEST(MetaTensors, GuardsNestAndConcernOneThread) {
  {
    const OnMeta outer;
    { const OnMeta inner; }
    EXPECT_TRUE(torch::empty({2}).is_meta());
    std::thread([] { EXPECT_TRUE(torch::empty({2}).is_cpu()); }).join();
    const MakingAsUsual usual;
    EXPECT_TRUE(torch::empty({2}).is_cpu());
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
}

TEST(MetaTensors, AReadOfAValueThrowsLibtorchsError) {
  const OnMeta on_meta;
  EXPECT_THROW(torch::ones({1}).item(), c10::Error);
}

TEST(MetaTensors, ATensorGetsMemoryInPlace) {
  torch::nn::Linear linear{nullptr};
  {
    const OnMeta on_meta;
    linear = torch::nn::Linear(3, 2);
  }
  ASSERT_TRUE(linear->weight.is_meta());
  torch::optim::AdamW optimizer(linear->parameters());
  for (const torch::Tensor& parameter : linear->parameters()) {
    const torch::Tensor memory = torch::ones(parameter.sizes());
    put_into(parameter, memory.storage(), torch::kFloat);
  }
  EXPECT_EQ(linear->weight.device(), torch::kCPU);
  EXPECT_TRUE(linear->weight.is_leaf() && linear->weight.requires_grad());
  EXPECT_TRUE(linear->weight.is_same(linear->parameters()[0]));
  linear(torch::ones({1, 3})).sum().backward();
  EXPECT_TRUE(torch::equal(linear->weight.grad(), torch::ones({2, 3})));
  optimizer.step();
  EXPECT_LT(linear->weight.max().item<double>(), 1.0);
}

TEST(MetaTensors, ATensorGetsAnotherDtypeInPlace) {
  const torch::Tensor tensor =
      torch::empty({2, 3}, torch::TensorOptions(torch::kHalf).device("meta"));
  EXPECT_EQ(storage_bytes(tensor, torch::kFloat), 24U);
  put_into(tensor, torch::ones({6}).storage(), torch::kFloat);
  EXPECT_TRUE(torch::equal(tensor, torch::ones({2, 3})));
}

}  // namespace
}  // namespace weft::shard
