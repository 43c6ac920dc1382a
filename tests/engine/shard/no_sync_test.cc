// SPDX-License-Identifier: Apache-2.0
// Gradients of backwards whose forwards were made inside of no_sync().
#include <utility>

#include <gtest/gtest.h>

#include <torch/optim/adamw.h>

#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

std::uint64_t seed_of(const ProcessGroup& group, int step) {
  return static_cast<std::uint64_t>(100 * step + group.rank());
}

TEST(ShardedNoSync, KeepsGradientsUntilTheNextBackward) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto train = [&](auto& wrapped, auto& model) {
      torch::optim::AdamW optimizer(model->parameters());
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        for (int part = 0; part < 3; ++part) {
          const auto local = wrapped.no_sync(part < 2);
          wrapped(numbers({4, 8}, seed_of(group, 10 * step + part))).square().mean().backward();
        }
        optimizer.step();
      }
    };
    auto reference = blocks(3);
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group);
    train(ddp, reference);
    auto model = blocks(3);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    train(sharded, model);
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
  });
}

TEST(ShardedNoSync, SendsNoGradients) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    {
      const auto local = sharded.no_sync();
      sharded(torch::ones({4, 8})).sum().backward();
    }
    for (const auto& shard : model->parameters())
      EXPECT_EQ(shard.grad().abs().sum().item<float>(), 0);
  });
}

// b runs inside of no_sync() only, so its gradients wait for a backward that does not use it.
TEST(ShardedNoSync, TheNextBackwardAveragesWhatUnitsThatItDoesNotUseHaveKept) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto train = [&](auto& wrapped, auto& model) {
      torch::optim::AdamW optimizer(model->parameters());
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        for (const bool uses_b : {true, false}) {
          const auto local = wrapped.no_sync(uses_b);
          wrapped(numbers({4, 8}, seed_of(group, 10 * step + uses_b)), uses_b).backward();
        }
        optimizer.step();
      }
    };
    auto reference = std::make_shared<BranchesImpl>();
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group, {.find_unused_parameters = true});
    train(ddp, reference);
    auto model = std::make_shared<BranchesImpl>();
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    train(sharded, model);
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
  });
}

// Both gradients are views of one tensor.
struct TwoViewsImpl : nn::Module {
  torch::Tensor first = register_parameter("first", torch::ones({4, 8}));
  torch::Tensor second = register_parameter("second", torch::ones({4, 8}));
  torch::Tensor forward(torch::Tensor x) {
    return ((first.unsqueeze(0) + second.unsqueeze(0)) * x).sum();
  }
};

TEST(ShardedNoSync, KeepsGradientsThatShareMemoryApart) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<TwoViewsImpl>();
    FullyShardedDataParallel sharded(model, group);
    for (const bool quiet : {true, true, false}) {
      const auto local = sharded.no_sync(quiet);
      sharded(torch::ones({1, 4, 8})).backward();
    }
    for (const auto& shard : model->parameters())
      EXPECT_TRUE(torch::equal(shard.grad(), torch::full_like(shard, 3)));
  });
}

TEST(ShardedNoSync, EndsForAWrapperThatWasMoved) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    nn::Linear model(nn::LinearOptions(1, 2).bias(false));
    FullyShardedDataParallel sharded(model, group);
    auto moved = [&] {
      const auto local = sharded.no_sync();
      return std::move(sharded);
    }();
    moved(torch::full({1, 1}, 1.0 + group.rank())).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().item<double>(), 1.5);
  });
}

TEST(ShardedNoSync, MixesWithinOneBackward) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    for (const bool quiet_first : {true, false}) {
      nn::Linear model(nn::LinearOptions(1, 2).bias(false));
      FullyShardedDataParallel sharded(model, group);
      const auto forward = [&](double value, bool quiet) {
        const auto scope = sharded.no_sync(quiet);
        return sharded(torch::full({1, 1}, value));
      };
      const double mine = 1 + group.rank();
      const auto a = forward(mine, quiet_first);
      const auto b = forward(10 * mine, !quiet_first);
      (a.sum() + b.sum()).backward();
      EXPECT_EQ(model->parameters()[0].grad().item<double>(), 16.5);
    }
  });
}

}  // namespace
}  // namespace weft::testing
