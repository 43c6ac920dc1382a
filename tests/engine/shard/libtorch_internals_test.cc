// SPDX-License-Identifier: Apache-2.0
// What engine/shard/ takes for granted of libtorch. If one of these tests fails with a new release
// of libtorch, engine/shard/libtorch_internals.cc has to follow that release.
#include <gtest/gtest.h>

#include <torch/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::shard {
namespace {

// Shells that belong to no unit: their operators throw what before_operator() says of that.
at::Tensor shell(at::IntArrayRef sizes, const char* error = "not gathered") {
  install({&ShardedModel::before_operator, &ShardedModel::after_change});
  at::Tensor tensor = torch::ones(sizes);
  become_shell(tensor, sizes, torch::ones(sizes).strides(), at::kFloat, {{}, 3}, error);
  return tensor;
}

TEST(LibtorchInternals, ShellsAndTheirViewsAreKnown) {
  const at::Tensor weight = shell({2, 3});
  EXPECT_TRUE(is_shell(weight));
  EXPECT_FALSE(is_shell(torch::ones({2})));
  ASSERT_NE(belonging(weight), nullptr);
  EXPECT_EQ(belonging(weight)->parameter, 3U);
  EXPECT_EQ(belonging(torch::ones({2})), nullptr);
  const at::Tensor detached(weight.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/false));
  EXPECT_TRUE(is_shell(detached));
  EXPECT_EQ(belonging(detached), belonging(weight));
}

TEST(LibtorchInternals, OperatorsOnAShellAskFirst) {
  const at::Tensor weight = shell({2, 3});
  EXPECT_THROW(weight.sum(), Error);
  EXPECT_THROW(torch::cat({weight, torch::ones({2, 3})}), Error);
  EXPECT_THROW(weight.t(), Error);
  EXPECT_EQ(weight.size(1), 3);
}

TEST(LibtorchInternals, MemoryOfAnEmptyShellThrowsTheSentence) {
  const at::Tensor weight = shell({2, 3}, "a sentence about it");
  try {
    weight.data_ptr();
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("a sentence about it"), std::string::npos);
  }
}

// Optimizers read the .grad of their parameters in one of these ways.
TEST(LibtorchInternals, EveryUseOfARefusedGradientThrowsTheSentence) {
  const at::Tensor weight = shell({2, 3});
  refuse_gradient(weight, "it is elsewhere");
  EXPECT_TRUE(weight.grad().defined());
  const auto text_of = [](const auto& use) -> std::string {
    try {
      use();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto expect_sentence = [&](const auto& use) {
    EXPECT_NE(text_of(use).find("it is elsewhere"), std::string::npos);
  };
  expect_sentence([&] { weight.mutable_grad().detach_(); });
  expect_sentence([&] { weight.mutable_grad().zero_(); });
  expect_sentence([&] { torch::ones({2, 3}).add_(weight.grad().data()); });
  expect_sentence([&] { torch::ones({2, 3}).addcmul_(weight.grad(), weight.grad()); });
  expect_sentence([&] { torch::cat({weight.grad().detach()}); });
  expect_sentence([&] { weight.grad().data_ptr(); });
  refuse_gradient(shell({}), "of a number");
  refuse_gradient(shell({0, 3}), "of nothing");
}

TEST(LibtorchInternals, HooksAreSeenUntilTheyAreRemoved) {
  const at::Tensor weight = torch::ones({2}, torch::requires_grad());
  EXPECT_FALSE(has_hooks(torch::ones({2})));
  EXPECT_FALSE(has_hooks(weight));
  const auto hook = weight.register_hook([](const at::Tensor&) {});
  EXPECT_TRUE(has_hooks(weight));
  weight.remove_hook(hook);
  EXPECT_FALSE(has_hooks(weight));
}

TEST(LibtorchInternals, AShellIsFilledAndReleased) {
  const at::Tensor weight = shell({2, 3});
  at::Tensor memory = torch::zeros({64}, torch::kByte);
  fill(weight, memory, 16);
  EXPECT_TRUE(is_filled(weight));
  EXPECT_EQ(weight.data_ptr(), static_cast<std::byte*>(memory.data_ptr()) + 16);
  EXPECT_EQ(memory.use_count(), 2U);
  release(weight);
  EXPECT_FALSE(is_filled(weight));
  EXPECT_EQ(memory.use_count(), 1U);
  EXPECT_THROW(weight.data_ptr(), c10::Error);
  EXPECT_EQ(belonging(weight)->parameter, 3U);
  fill(weight, memory, 0);
  EXPECT_EQ(weight.data_ptr(), memory.data_ptr());
}

TEST(LibtorchInternals, FillingIsNoChangeForAutograd) {
  const at::Tensor weight = shell({2, 3});
  const auto version = weight._version();
  fill(weight, torch::zeros({24}, torch::kByte), 0);
  release(weight);
  EXPECT_EQ(weight._version(), version);
}

TEST(LibtorchInternals, AShardsOwnerTravelsWithItsAliasesOnly) {
  const at::Tensor shard = torch::ones({2});
  set_owner(shard, nullptr, 5);
  EXPECT_EQ(owner_of(shard).parameter, 5U);
  EXPECT_EQ(owner_of(shard.detach()).parameter, 5U);
  EXPECT_EQ(owner_of(shard.clone()).parameter, 0U);
  EXPECT_EQ(owner_of(torch::ones({2})).parameter, 0U);
}

TEST(LibtorchInternals, AModulesEntryIsReplaced) {
  torch::nn::Linear linear(2, 3);
  const at::Tensor other = torch::ones({1});
  parameter_entry(*linear, "weight") = other;
  EXPECT_TRUE(linear->named_parameters()["weight"].is_same(other));
  EXPECT_FALSE(linear->weight.is_same(other));
  EXPECT_THROW(parameter_entry(*linear, "none"), Error);
}

// Counts in which order the engine runs nodes.
struct Ordered final : torch::autograd::Node {
  Ordered(std::uint64_t number, std::string label, std::vector<std::string>* ran)
      : Node(number), label(std::move(label)), ran(ran) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    ran->push_back(label);
    return torch::autograd::variable_list(num_outputs(), gradients.at(0));
  }
  std::string label;
  std::vector<std::string>* ran;
};

// engine/shard/gradients.cc gives its nodes the least and the greatest number.
TEST(LibtorchInternals, TheEngineRunsGreaterSequenceNumbersFirst) {
  std::vector<std::string> ran;
  const auto make = [&](std::uint64_t number, const char* label) {
    auto node = make_node<Ordered>(number, label, &ran);
    node->add_input_metadata(torch::ones({1}));
    return node;
  };
  const auto last = make(0, "last");
  const auto middle = make(5, "middle");
  const auto first = make(std::numeric_limits<std::uint64_t>::max(), "first");
  auto root = make(100, "root");
  for (const auto& node : {last, middle, first}) root->add_next_edge({node, 0});
  at::Tensor result = torch::ones({1});
  torch::autograd::impl::set_gradient_edge(result, {root, 0});
  result.backward();
  EXPECT_EQ(ran, (std::vector<std::string>{"root", "first", "middle", "last"}));
}

TEST(LibtorchInternals, AModuleIsLookedAtWithoutItsChildren) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2));
  {
    const WithoutChildren alone(*net);
    EXPECT_TRUE(net->parameters().empty());
  }
  EXPECT_EQ(net->named_parameters()["0.weight"].numel(), 4);
}

TEST(LibtorchInternals, WithoutHooksAShellIsAUsualTensor) {
  const at::Tensor weight = shell({2, 3});
  const at::Tensor memory = torch::ones({6});
  fill(weight, memory, 0);
  {
    const WithoutHooks plain;
    EXPECT_TRUE(torch::equal(weight.t(), torch::ones({3, 2})));
  }
  EXPECT_THROW(weight.sum(), Error);
}

}  // namespace
}  // namespace weft::shard
