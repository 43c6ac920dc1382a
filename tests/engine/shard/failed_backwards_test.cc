// SPDX-License-Identifier: Apache-2.0
// Sharded models after a backward that has thrown halfway.
#include <stdexcept>
#include <utility>

#include "two_ranks.h"

namespace weft::testing {
namespace {

// Blocks whose backward throws before that of the first one, if it is told to.
struct FailingImpl : nn::Module {
  FailingImpl() {
    for (int i = 0; i < 3; ++i)
      parts.push_back(register_module("part" + std::to_string(i), Block()));
    fill_values(*this);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      x = parts[i](x);
      if (i != 0) continue;
      x.register_hook([this](const torch::Tensor&) {
        if (std::exchange(fails, false)) throw std::runtime_error("halfway");
      });
    }
    return x.square().mean();
  }
  std::vector<Block> parts;
  bool fails = false;
};

void expect_equal_gradients(const nn::Module& a, const nn::Module& b) {
  EXPECT_TRUE(are_equal(gradients(a), gradients(b)));
}

TEST(ShardedFailedBackwards, LeaveNothingThatNoSyncHasKept) {
  on_two_ranks([](ProcessGroup& group) {
    const auto clean = std::make_shared<FailingImpl>(), model = std::make_shared<FailingImpl>();
    FullyShardedDataParallel reference(clean, group), sharded(model, group);
    reference(batch_of(group, 1)).backward();
    {
      const auto local = sharded.no_sync();
      sharded(batch_of(group, 2)).backward();
    }
    model->fails = true;
    EXPECT_THROW(sharded(batch_of(group, 3)).backward(), std::runtime_error);
    sharded(batch_of(group, 1)).backward();
    expect_equal_gradients(*model, *clean);
    harness::meet(group);
    EXPECT_NE(harness::LogWatch::current().text().find("no_sync() had kept"), std::string::npos);
  });
}

TEST(ShardedFailedBackwards, OfNoSyncTooAreDroppedByZeroGrad) {
  on_two_ranks([](ProcessGroup& group) {
    const auto clean = std::make_shared<FailingImpl>(), model = std::make_shared<FailingImpl>();
    FullyShardedDataParallel reference(clean, group), sharded(model, group);
    reference(batch_of(group, 1)).backward();
    model->fails = true;
    {
      const auto local = sharded.no_sync();
      EXPECT_THROW(sharded(batch_of(group, 2)).backward(), std::runtime_error);
    }
    model->zero_grad();
    sharded(batch_of(group, 1)).backward();
    expect_equal_gradients(*model, *clean);
  });
}

struct TwoOutputsImpl : nn::Module {
  std::vector<torch::Tensor> forward() { return {one.sum(), two.sum()}; }
  torch::Tensor one = register_parameter("one", torch::ones({4}));
  torch::Tensor two = register_parameter("two", torch::ones({4}));
};

// The first backward fails when it has begun to average the gradient of `one`.
TEST(ShardedFailedBackwards, TheNextOneOfTheirGraphAveragesItsOwnGradients) {
  on_two_ranks([](ProcessGroup& group) {
    const auto model = std::make_shared<TwoOutputsImpl>();
    FullyShardedDataParallel sharded(model, group);
    // Two nodes, since the unit's last one has the priority of a thread's first.
    const auto early = torch::ones({}, torch::requires_grad()).exp().exp();
    early.register_hook([](const torch::Tensor&) { throw std::runtime_error("halfway"); });
    const auto outputs = sharded();
    EXPECT_THROW((outputs[0] + early).backward({}, /*retain_graph=*/true), std::runtime_error);
    outputs[1].backward();
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    EXPECT_TRUE(torch::equal(model->parameters()[1].grad(), torch::ones({2})));
  });
}

TEST(ShardedFailedBackwards, ARetryDoesNotAverageWhatNoSyncHasKept) {
  on_two_ranks([](ProcessGroup& group) {
    const auto clean = std::make_shared<FailingImpl>(), model = std::make_shared<FailingImpl>();
    FullyShardedDataParallel reference(clean, group), sharded(model, group);
    reference(batch_of(group, 1)).backward();
    {
      const auto local = sharded.no_sync();
      sharded(batch_of(group, 2)).backward();
    }
    const auto loss = sharded(batch_of(group, 1));
    model->fails = true;
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
    loss.backward();
    expect_equal_gradients(*model, *clean);
  });
}

}  // namespace
}  // namespace weft::testing
