// SPDX-License-Identifier: Apache-2.0
// FullParameters: whole parameters of a sharded model, to read and to write.
#include "two_ranks.h"

namespace weft::testing {
namespace {

TEST(FullParametersTest, ParametersAndMembersAreWhole) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    const auto before = copies(net->parameters());
    const auto block = std::dynamic_pointer_cast<BlockImpl>(net->ptr(0));
    FullyShardedDataParallel sharded(net, group);
    const auto shards = net->parameters();
    {
      const FullParameters full(*net);
      EXPECT_TRUE(are_equal(copies(net->parameters()), before));
      EXPECT_TRUE(net->parameters()[0].is_leaf());
      EXPECT_TRUE(net->parameters()[0].requires_grad());
      EXPECT_TRUE(torch::equal(block->up->weight.detach(), before[0]));
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(net->forward(torch::ones({1, 8})), sharded(torch::ones({1, 8}))));
    }
    EXPECT_THROW(block->up->weight.sum(), Error);
    for (std::size_t i = 0; i < shards.size(); ++i)
      EXPECT_TRUE(net->parameters()[i].is_same(shards[i]));
  });
}

TEST(FullParametersTest, WritableKeepsOwnRows) {
  on_two_ranks([](ProcessGroup& group) {
    nn::Sequential net(nn::Linear(8, 5), nn::Linear(5, 1));
    FullyShardedDataParallel sharded(net, group);
    {
      const FullParameters full(*net, /*writable=*/true);
      fill_values(*net, 9);
    }
    nn::Sequential expected(nn::Linear(8, 5), nn::Linear(5, 1));
    fill_values(*expected, 9);
    EXPECT_TRUE(are_equal(whole(*net), copies(expected->parameters())));
  });
}

TEST(FullParametersTest, WithoutWritableNothingIsKept) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    const auto before = copies(net->parameters());
    FullyShardedDataParallel sharded(net, group);
    {
      const FullParameters full(*net);
      fill_values(*net, 9);
    }
    EXPECT_TRUE(are_equal(whole(*net), before));
  });
}

TEST(FullParametersTest, ValuesAreInTheParametersOwnDtype) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    FullyShardedDataParallel sharded(net, group, {.param_dtype = torch::kBFloat16});
    {
      const FullParameters full(*net, /*writable=*/true);
      EXPECT_EQ(net->parameters()[0].scalar_type(), torch::kFloat);
      fill_values(*net, 9);
    }
    auto expected = filled_blocks(1, 9);
    EXPECT_TRUE(are_equal(whole(*net), copies(expected->parameters())));
  });
}

TEST(FullParametersTest, MayLieBetweenForwardAndBackward) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(3);
    FullyShardedDataParallel sharded(net, group);
    sharded(torch::ones({4, 8})).sum().backward();
    const auto expected = copies({net->parameters()[0].grad()});
    net->zero_grad();
    const auto loss = sharded(torch::ones({4, 8})).sum();
    whole(*net);
    loss.backward();
    EXPECT_TRUE(are_equal({net->parameters()[0].grad()}, expected));
  });
}

TEST(FullParametersTest, RefusesABackwardOfTheModelItHolds) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = blocks(2);
    FullyShardedDataParallel sharded(net, group);
    sharded(torch::ones({4, 8})).sum().backward();
    const FullParameters full(*net);
    if (group.rank() == 1) return;  // not a collective
    const auto loss = net->forward(torch::ones({4, 8})).sum();
    EXPECT_THAT(error_of([&] { loss.backward(); }).text(), HasSubstr("while FullParameters lives"));
  });
}

TEST(FullParametersTest, KeepsTheRowsOfAParameterThatGotAnotherShape) {
  on_two_ranks([](ProcessGroup& group) {
    harness::LogWatch::current().allow("keeps the values that it had");
    auto net = blocks(1);
    const FullyShardedDataParallel sharded(net, group);
    const auto before = copies(net->parameters());
    {
      const FullParameters full(*net, true);
      const torch::NoGradGuard no_grad;
      net->parameters()[0].set_(torch::ones({3, 8}));
    }
    EXPECT_TRUE(are_equal(copies(net->parameters()), before));
    EXPECT_THAT(harness::LogWatch::current().text(), HasSubstr("keeps the values that it had"));
  });
}

TEST(FullParametersTest, DoesNothingForAPlainModule) {
  auto net = blocks(1);
  const auto before = net->parameters();
  const FullParameters full(*net);
  EXPECT_TRUE(net->parameters()[0].is_same(before[0]));
}

}  // namespace
}  // namespace weft::testing
