// SPDX-License-Identifier: Apache-2.0
// Sharded models under other conditions: evaluation, autocast, several models, failures.
#include <gtest/gtest.h>

#include <c10/core/InferenceMode.h>
#include <torch/optim/adamw.h>

#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit.h>
#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

std::uint64_t seed(const ProcessGroup& group, int step = 0) {
  return static_cast<std::uint64_t>(10 * step + group.rank());
}

TEST(ShardedConditions, EvaluationGivesTheWholeModelsOutput) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto reference = blocks(3);
    fill_values(*reference);
    auto net = blocks(3);
    fill_values(*net);
    FullyShardedDataParallel sharded(net, group);
    const auto inputs = numbers({4, 8}, seed(group));
    const auto expected = reference->forward(inputs).detach();
    for (int step = 0; step < 3; ++step) {
      {
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(sharded(inputs), expected));
      }
      {
        const c10::InferenceMode inference;
        EXPECT_TRUE(torch::equal(sharded(inputs), expected));
      }
      EXPECT_TRUE(torch::equal(sharded(inputs).detach(), expected));
    }
  });
}

TEST(ShardedConditions, EvaluationBetweenForwardAndBackwardChangesNothing) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    std::vector<torch::Tensor> gradients[2];
    for (const bool evaluates : {false, true}) {
      auto net = blocks(3);
      fill_values(*net);
      FullyShardedDataParallel sharded(net, group);
      const auto loss = sharded(numbers({4, 8}, seed(group))).square().sum();
      if (evaluates) {
        const torch::NoGradGuard no_grad;
        sharded(torch::ones({2, 8}));
      }
      loss.backward();
      for (const auto& shard : net->parameters())
        gradients[evaluates ? 1 : 0].push_back(shard.grad());
    }
    EXPECT_TRUE(are_equal(gradients[0], gradients[1]));
  });
}

// Trains in the way of `step`, which returns a loss, and returns the parameters.
template <class Step>
void train(nn::Module& model, const Step& step) {
  torch::optim::AdamW optimizer(model.parameters());
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    step(i).backward();
    optimizer.step();
  }
}

TEST(ShardedConditions, AutocastKeepsTheBitsOfDdp) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto run = [&](auto& wrapped, nn::Module& model) {
      train(model, [&](int i) {
        const AutocastGuard autocast(at::kCPU, at::kBFloat16);
        return wrapped(numbers({4, 8}, seed(group, i))).to(torch::kFloat).square().mean();
      });
    };
    auto reference = blocks(3);
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group);
    run(ddp, *reference);
    auto net = blocks(3);
    fill_values(*net);
    FullyShardedDataParallel sharded(net, group);
    run(sharded, *net);
    EXPECT_TRUE(are_equal(whole(*net), copies(reference->parameters())));
  });
}

TEST(ShardedConditions, TwoShardedModelsShareABackward) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto run = [&](auto& front, auto& back, nn::Module& one, nn::Module& two) {
      torch::optim::AdamW first(one.parameters()), second(two.parameters());
      for (int i = 0; i < 3; ++i) {
        first.zero_grad();
        second.zero_grad();
        back(front(numbers({4, 8}, seed(group, i)))).square().mean().backward();
        first.step();
        second.step();
      }
    };
    auto a = blocks(2), b = blocks(3);
    fill_values(*a);
    fill_values(*b);
    DistributedDataParallel ddp_a(a, group), ddp_b(b, group);
    run(ddp_a, ddp_b, *a, *b);
    auto c = blocks(2), d = blocks(3);
    fill_values(*c);
    fill_values(*d);
    FullyShardedDataParallel sharded_c(c, group), sharded_d(d, group);
    run(sharded_c, sharded_d, *c, *d);
    EXPECT_TRUE(are_equal(whole(*c), copies(a->parameters())));
    EXPECT_TRUE(are_equal(whole(*d), copies(b->parameters())));
  });
}

TEST(ShardedConditions, GradientsAndStateTakeTheirShare) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(2, 8, 64);
    FullyShardedDataParallel sharded(net, group);
    torch::optim::AdamW optimizer(net->parameters());
    sharded(torch::ones({4, 8})).sum().backward();
    optimizer.step();
    std::size_t whole_bytes = 0, shards = 0;
    std::map<const void*, std::size_t> gradients;  // by storage: those of a unit share one
    for (const auto& shard : net->parameters()) {
      const auto [unit, index] = shard::owner_of(shard);
      whole_bytes += unit->parameters()[index].whole.nbytes();
      shards += shard.storage().nbytes();
      gradients[shard.grad().storage().unsafeGetStorageImpl()] = shard.grad().storage().nbytes();
      const auto& state = static_cast<torch::optim::AdamWParamState&>(
          *optimizer.state().at(shard.unsafeGetTensorImpl()));
      EXPECT_EQ(state.exp_avg().sizes(), shard.sizes());
    }
    EXPECT_EQ(2 * shards, whole_bytes);
    std::size_t gradient_bytes = 0;
    for (const auto& [storage, bytes] : gradients) gradient_bytes += bytes;
    // One number more for each parameter: how many ranks have used it.
    EXPECT_EQ(gradient_bytes, shards + 8 * sizeof(float));
  });
}

TEST(ShardedConditions, AnExceptionInForwardLeavesItUsable) {
  struct MoodyImpl : nn::Module {
    MoodyImpl() : a(register_module("a", Block())), b(register_module("b", Block())) {}
    torch::Tensor forward(torch::Tensor x, bool throws) {
      x = a(x);
      if (throws) throw std::runtime_error("not today");
      return b(x);
    }
    Block a, b;
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<MoodyImpl>();
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    const auto inputs = torch::ones({4, 8});
    sharded(inputs, false).sum().backward();
    EXPECT_THROW(sharded(inputs, true), std::runtime_error);
    EXPECT_THROW(model->a->up->weight.sum(), Error);  // the forward has ended
    const auto before = copies({model->parameters()[0].grad()});
    model->zero_grad();
    sharded(inputs, false).sum().backward();
    EXPECT_TRUE(are_equal({model->parameters()[0].grad()}, before));
  });
}

TEST(ShardedConditions, ALostRankFailsTheForwardOfTheOthers) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(2);
    FullyShardedDataParallel sharded(net, group);
    sharded(torch::ones({4, 8})).sum().backward();
    if (group.rank() == 1) {
      group.abort("it goes");
      return;
    }
    const auto forward = [&] {
      for (;;) sharded(torch::ones({4, 8}));
    };
    EXPECT_THROW(forward(), Error);
    EXPECT_THROW(sharded(torch::ones({4, 8})), Error);  // again, and does not hang
  });
}

TEST(ShardedConditions, AMovedWrapperWorks) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(2);
    FullyShardedDataParallel first(net, group);
    FullyShardedDataParallel second = std::move(first);
    second(torch::ones({4, 8})).sum().backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
    EXPECT_EQ(second.module(), net.ptr());
  });
}

TEST(ShardedConditions, ParametersOfADroppedModuleAreFreed) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    std::weak_ptr<shard::Unit> unit;
    torch::Tensor member;
    {
      auto net = blocks(1);
      FullyShardedDataParallel sharded(net, group);
      sharded(torch::ones({4, 8})).sum().backward();
      unit = shard::owner_of(net->parameters()[0]).unit;
      member = std::dynamic_pointer_cast<BlockImpl>(net->ptr(0))->up->weight;
    }
    EXPECT_TRUE(unit.expired());
    EXPECT_THROW(member.sum(), Error);
  });
}

TEST(ShardedConditions, EveryBackendOfTheHostTrains) {
  for (const char* backend : {"tcp", "gloo"}) {
    run_ranks(As::Threads, 2,
              [](ProcessGroup& group) {
                const auto run = [&](auto& wrapped, nn::Module& model) {
                  train(model, [&](int i) {
                    return wrapped(numbers({4, 8}, seed(group, i))).square().mean();
                  });
                };
                auto reference = nn::Sequential(nn::Linear(8, 5), nn::Linear(5, 1));
                fill_values(*reference);
                DistributedDataParallel ddp(reference, group);
                run(ddp, *reference);
                auto net = nn::Sequential(nn::Linear(8, 5), nn::Linear(5, 1));
                fill_values(*net);
                FullyShardedDataParallel sharded(net, group);
                run(sharded, *net);
                EXPECT_TRUE(are_equal(whole(*net), copies(reference->parameters())));
              },
              {.backend = backend});
  }
}

}  // namespace
}  // namespace weft::testing
