// SPDX-License-Identifier: Apache-2.0
// What happens during the forwards and backwards of a sharded model: when units are gathered and
// freed, which gradients come, and what several passes do together.
#include <chrono>
#include <future>

#include <gtest/gtest.h>

#include <torch/autograd.h>
#include <torch/optim/adamw.h>

#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/sharded_model.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

std::shared_ptr<shard::Unit> unit_of(const torch::Tensor& shard) {
  return shard::owner_of(shard).unit;
}
shard::GatheredUnits::Statistics statistics(const nn::Module& model) {
  return unit_of(model.parameters().front())->model.lock()->statistics();
}
std::uint64_t seed(const ProcessGroup& group, int step = 0) {
  return static_cast<std::uint64_t>(10 * step + group.rank());
}

TEST(ShardedPasses, ShardsAreRowsOfDimensionZero) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    nn::Sequential net(nn::Linear(4, 5), nn::Linear(5, 1));
    fill_values(*net);
    const auto before = copies(net->parameters());
    FullyShardedDataParallel sharded(net, group);
    const bool first = group.rank() == 0;
    const auto named = net->named_parameters();
    EXPECT_EQ(named.keys(), (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias"}));
    EXPECT_TRUE(torch::equal(named["0.weight"], before[0].slice(0, first ? 0 : 3, first ? 3 : 5)));
    EXPECT_EQ(named["1.weight"].sizes(), (at::IntArrayRef{first ? 1 : 0, 5}));
    EXPECT_EQ(named["1.bias"].dim(), 1);
    EXPECT_TRUE(named["0.weight"].is_leaf() && named["0.weight"].requires_grad());
    EXPECT_EQ(named["0.weight"].storage().nbytes(), (first ? 3U : 2U) * 4 * sizeof(float));
  });
}

TEST(ShardedPasses, MemoryOfPassedUnitsIsFreed) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(4);
    FullyShardedDataParallel sharded(net, group);
    std::vector<torch::Tensor> weights;
    for (int i = 0; i < 4; ++i)
      weights.push_back(
          std::dynamic_pointer_cast<BlockImpl>(net->ptr(static_cast<std::size_t>(i)))->up->weight);
    const auto gathered = [&] {
      return std::ranges::count_if(weights, [](const auto& w) { return shard::is_filled(w); });
    };
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(gathered(), 0);
      const auto loss = sharded(torch::ones({4, 8})).sum();
      // The last, with which backward begins, and the one that it uses then, which step 0 records.
      EXPECT_EQ(gathered(), step == 0 ? 1 : 2);
      loss.backward();
      EXPECT_EQ(gathered(), 0);
    }
    {
      const torch::NoGradGuard no_grad;
      sharded(torch::ones({4, 8}));
      EXPECT_EQ(gathered(), 0);
    }
  });
}

// Four units: four gathers in forward, and three in backward, which begins with the last one. From
// the second step on it is known that backward goes on with the third unit, which stays too.
TEST(ShardedPasses, EachUnitIsGatheredOnceForForwardAndBackward) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    for (const bool reshards : {true, false}) {
      auto net = blocks(4);
      FullyShardedDataParallel sharded(net, group, {.reshard_after_forward = reshards});
      for (int step = 0; step < 3; ++step) sharded(torch::ones({4, 8})).sum().backward();
      EXPECT_EQ(statistics(*net).gathers, reshards ? 7U + 6U + 6U : 12U);
    }
  });
}

TEST(ShardedPasses, UnitsAreGatheredAheadFromTheSecondStepOn) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(4);
    FullyShardedDataParallel sharded(net, group);
    sharded(torch::ones({4, 8})).sum().backward();
    EXPECT_EQ(statistics(*net).ahead, 0U);
    sharded(torch::ones({4, 8})).sum().backward();
    EXPECT_EQ(statistics(*net).ahead, 6U);  // 4 for forward, 2 for backward
    EXPECT_EQ(statistics(*net).gathers, 13U);
  });
}

TEST(ShardedPasses, BackwardBeginsWithTheUnitsThatForwardUsedLast) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    for (const int prefetch : {0, 1, 2, 5}) {
      auto net = blocks(4);
      FullyShardedDataParallel sharded(net, group, {.prefetch = prefetch});
      sharded(torch::ones({4, 8})).sum().backward();
      const std::size_t first = statistics(*net).gathers;
      sharded(torch::ones({4, 8})).sum().backward();
      const auto stay = static_cast<std::size_t>(std::min(1 + prefetch, 4));
      EXPECT_EQ(statistics(*net).gathers - first, 4 + (4 - stay)) << "prefetch " << prefetch;
    }
  });
}

// A forward keeps them, and no backward follows.
TEST(ShardedPasses, UnitsThatStayForABackwardInVainAreFreed) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(4);
    FullyShardedDataParallel sharded(net, group);
    for (int step = 0; step < 2; ++step) sharded(torch::ones({4, 8})).sum().backward();
    const std::size_t unit = unit_of(net->parameters().front())->bytes();
    { const auto loss = sharded(torch::ones({4, 8})).sum(); }  // without a backward
    sharded(torch::ones({4, 8})).sum().backward();
    EXPECT_EQ(statistics(*net).most_bytes, 2 * unit);
    for (const auto& parameter : net->parameters()) {
      EXPECT_NE(unit_of(parameter)->state(), shard::Unit::State::Gathered);
    }
  });
}

// Backward does not reach the first unit.
TEST(ShardedPasses, FrozenUnitsAreFreedBehindBackward) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(3);
    FullyShardedDataParallel sharded(net, group, {.reshard_after_forward = false});
    for (auto& shard : net->ptr(0)->parameters()) shard.set_requires_grad(false);
    const auto unit = unit_of(net->parameters().front());
    for (int step = 0; step < 2; ++step) {
      const auto loss = sharded(torch::ones({4, 8})).sum();
      EXPECT_EQ(unit->state(), shard::Unit::State::Gathered);
      loss.backward();
      EXPECT_EQ(unit->state(), shard::Unit::State::Sharded);
    }
  });
}

// The shards outlive the wrapper.
TEST(ShardedPasses, IdleMemoryGoesWithTheWrapper) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(2, 256, 256);
    auto sharded = std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(net, group);
    const auto unit = unit_of(net->parameters().front());
    (*sharded)(torch::ones({4, 256})).sum().backward();
    EXPECT_GT(unit->pool->idle_bytes(), 0U);
    sharded.reset();
    EXPECT_EQ(unit->pool->idle_bytes(), 0U);
  });
}

TEST(ShardedPasses, GatheredMemoryStaysWithinOneUnitAndThePrefetchedOnes) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    for (const int prefetch : {0, 1, 2}) {
      auto net = blocks(5);
      FullyShardedDataParallel sharded(net, group, {.prefetch = prefetch});
      for (int step = 0; step < 3; ++step) sharded(torch::ones({4, 8})).sum().backward();
      const std::size_t unit = unit_of(net->parameters().front())->bytes();
      EXPECT_EQ(statistics(*net).most_bytes, unit * (1 + static_cast<std::size_t>(prefetch)));
    }
  });
}

// Blocks that tell when forward and backward come to a place between two of them.
struct WatchedImpl : nn::Module {
  explicit WatchedImpl(int count) {
    for (int i = 0; i < count; ++i)
      parts.push_back(register_module("part" + std::to_string(i), Block()));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      x = parts[i](x);
      if (on_forward) on_forward(i);
      if (on_backward && x.requires_grad())
        x.register_hook([this, i](const torch::Tensor&) { on_backward(i); });
    }
    return x;
  }
  std::vector<Block> parts;
  std::function<void(std::size_t part)> on_forward, on_backward;
};

// One rank has come to a place for which another one waits.
struct Signal {
  std::promise<void> promise;
  void wait() {
    const auto status = promise.get_future().wait_for(std::chrono::seconds(20));
    EXPECT_EQ(status, std::future_status::ready) << "the other rank did not come so far";
  }
};

// Rank 1 stands between the parts 0 and 1 until rank 0 has computed with part 1.
TEST(ShardedPasses, AUnitIsGatheredBehindTheForwardOfTheOneBefore) {
  Signal signal;
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto model = std::make_shared<WatchedImpl>(2);
    FullyShardedDataParallel sharded(model, group);
    sharded(torch::ones({4, 8})).sum().backward();
    model->on_forward = [&](std::size_t part) {
      if (group.rank() == 0 && part == 1) signal.promise.set_value();
      if (group.rank() == 1 && part == 0) signal.wait();
    };
    sharded(torch::ones({4, 8})).sum().backward();
  });
}

// Rank 1 stands before the backward of part 1 until rank 0 has come to that of part 0.
TEST(ShardedPasses, GradientsAreReducedBehindTheNextBackward) {
  Signal signal;
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto model = std::make_shared<WatchedImpl>(2);
    FullyShardedDataParallel sharded(model, group, {.reshard_after_forward = false});
    model->on_backward = [&](std::size_t part) {
      if (group.rank() == 0 && part == 0) signal.promise.set_value();
      if (group.rank() == 1 && part == 1) signal.wait();
    };
    sharded(torch::ones({4, 8})).sum().backward();
  });
}

TEST(ShardedPasses, AChangeOfOrderWorksAndIsSaidOnce) {
  struct PickyImpl : nn::Module {
    PickyImpl() {
      for (int i = 0; i < 4; ++i)
        parts.push_back(register_module("part" + std::to_string(i), nn::Linear(8, 8)));
    }
    torch::Tensor forward(torch::Tensor x, const std::vector<std::size_t>& order) {
      for (const std::size_t i : order) x = torch::tanh(parts[i](x));
      return x;
    }
    std::vector<nn::Linear> parts;
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto train = [&](auto& wrapped, auto& model) {
      torch::optim::SGD optimizer(model->parameters(), 0.5);
      const std::vector<std::vector<std::size_t>> orders = {
          {0, 1, 2, 3}, {0, 1, 2, 3}, {3, 1, 0, 2}, {3, 1, 0, 2}, {0, 1, 2, 3}};
      int step = 0;
      for (const auto& order : orders) {
        optimizer.zero_grad();
        wrapped(numbers({4, 8}, seed(group, step++)), order).square().sum().backward();
        optimizer.step();
      }
    };
    auto reference = std::make_shared<PickyImpl>();
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group);
    train(ddp, reference);
    auto model = std::make_shared<PickyImpl>();
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    train(sharded, model);
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
    harness::meet(group);
    const std::string log = harness::LogWatch::current().text();
    std::size_t said = 0;
    for (auto at = log.find("another order"); at != std::string::npos;
         at = log.find("another order", at + 1))
      ++said;
    EXPECT_EQ(said, 2U);  // on each rank
  });
}

TEST(ShardedPasses, UnitsThatNoRankUsesHaveNoGradient) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<BranchesImpl>();
    FullyShardedDataParallel sharded(model, group);
    sharded(torch::ones({4, 8}), false).backward();
    for (const auto& item : model->named_parameters())
      EXPECT_EQ(item.value().grad().defined(), item.key()[0] != 'b') << item.key();
  });
}

TEST(ShardedPasses, ParametersOfAUsedUnitThatNoRankUsesHaveNoGradient) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<BranchesImpl>();
    FullyShardedDataParallel sharded(model, group);
    sharded(torch::ones({4, 8}), true, true).backward();
    for (const auto& item : model->b->named_parameters())
      EXPECT_EQ(item.value().grad().defined(), item.key() == "down.weight") << item.key();
  });
}

// Zeros are averaged for a rank that leaves out a parameter of a unit that it uses.
TEST(ShardedPasses, AParameterThatOneRankUsesGetsItsAverage) {
  struct HalfImpl : nn::Module {
    HalfImpl()
        : one(register_parameter("one", torch::ones({4}))),
          two(register_parameter("two", torch::ones({4}))) {}
    torch::Tensor forward(bool uses_two) { return uses_two ? (one + two).sum() : one.sum(); }
    torch::Tensor one, two;
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<HalfImpl>();
    FullyShardedDataParallel sharded(model, group);
    sharded(group.rank() == 1).backward();
    EXPECT_TRUE(torch::equal(model->parameters()[0].grad(), torch::ones({2})));
    EXPECT_TRUE(torch::equal(model->parameters()[1].grad(), torch::full({2}, 0.5)));
  });
}

TEST(ShardedPasses, GradFunctionAndHooksSeeShards) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    int calls = 0;
    model->parameters()[0].register_hook([&](const torch::Tensor& gradient) {
      ++calls;
      EXPECT_EQ(gradient.sizes(), model->parameters()[0].sizes());
    });
    const auto inputs = numbers({4, 8}, seed(group));
    const auto gradients = torch::autograd::grad({sharded(inputs).sum()}, model->parameters());
    EXPECT_EQ(calls, 1);
    sharded(inputs).sum().backward();
    for (std::size_t i = 0; i < gradients.size(); ++i)
      EXPECT_TRUE(torch::equal(gradients[i], model->parameters()[i].grad()));
  });
}

TEST(ShardedPasses, AGradientPenaltyGoesThroughFreedUnits) {
  const auto penalty = [](auto& wrapped, const torch::Tensor& inputs) {
    const auto x = inputs.clone().requires_grad_();
    const auto gradient = torch::autograd::grad({wrapped(x).sum()}, {x}, {}, true, true)[0];
    return gradient.square().sum();
  };
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto reference = blocks(2);
    fill_values(*reference);
    const auto inputs = numbers({4, 8}, 3);
    struct Plain {
      nn::Sequential net;
      torch::Tensor operator()(const torch::Tensor& x) { return net->forward(x); }
    } plain{reference};
    penalty(plain, inputs).backward();
    auto model = blocks(2);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    penalty(sharded, inputs).backward();
    std::vector<torch::Tensor> expected;
    for (const auto& parameter : reference->parameters()) {
      const auto rows = shard::rows_of(parameter.size(0), group.rank(), 2);
      expected.push_back(parameter.grad().defined()
                             ? parameter.grad().narrow(0, rows.first, rows.count)
                             : torch::Tensor());
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto mine = model->parameters()[i].grad();
      if (!expected[i].defined()) {
        EXPECT_FALSE(mine.defined() && mine.abs().sum().item<float>() > 0);
      } else {
        EXPECT_TRUE(torch::allclose(mine, expected[i], 1e-5, 1e-6));
      }
    }
  });
}

TEST(ShardedPasses, LowPrecisionComputesAndReducesInItsDtypes) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto reference = blocks(2);
    fill_values(*reference);
    auto model = blocks(2);
    fill_values(*model);
    FullyShardedDataParallel sharded(
        model, group, {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat});
    const auto inputs = numbers({4, 8}, 3);  // the same on both ranks
    const auto output = sharded(inputs);
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    output.to(torch::kFloat).square().mean().backward();
    reference->forward(inputs).square().mean().backward();
    for (std::size_t i = 0; i < reference->parameters().size(); ++i) {
      const auto shard = model->parameters()[i];
      ASSERT_EQ(shard.scalar_type(), torch::kFloat);
      ASSERT_EQ(shard.grad().scalar_type(), torch::kFloat);
      const auto gradient = reference->parameters()[i].grad();
      const auto rows = shard::rows_of(gradient.size(0), group.rank(), 2);
      const auto mine = gradient.narrow(0, rows.first, rows.count);
      EXPECT_LT((shard.grad() - mine).norm().item<float>(), 0.05 * gradient.norm().item<float>());
    }
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));  // in float
  });
}

TEST(ShardedPasses, ParamDtypeCastsArgumentsThatAreTensors) {
  struct ListedImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x, const std::vector<torch::Tensor>& more) {
      EXPECT_EQ(x.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(more[0].scalar_type(), torch::kFloat);
      return linear(x).sum();
    }
    nn::Linear linear = register_module("linear", nn::Linear(8, 8));
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto model = std::make_shared<ListedImpl>();
    FullyShardedDataParallel sharded(model, group, {.param_dtype = torch::kBFloat16});
    const auto x = torch::ones({4, 8});
    sharded(x, std::vector<torch::Tensor>{x}).backward();
  });
}

TEST(ShardedPasses, ReduceDtypeAloneConcernsGradientsOnly) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(1);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group, {.reduce_dtype = torch::kBFloat16});
    sharded(numbers({4, 8}, 3)).square().mean().backward();
    const auto gradient = model->parameters()[0].grad();
    EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(gradient, gradient.to(torch::kBFloat16).to(torch::kFloat)));
  });
}

TEST(ShardedPasses, FreezingAndThawingFollowsTheShards) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    for (auto& shard : model->ptr(0)->parameters()) shard.set_requires_grad(false);
    sharded(torch::ones({4, 8})).sum().backward();
    for (const auto& shard : model->ptr(0)->parameters()) EXPECT_FALSE(shard.grad().defined());
    for (const auto& shard : model->ptr(1)->parameters()) EXPECT_TRUE(shard.grad().defined());
    for (auto& shard : model->ptr(0)->parameters()) shard.set_requires_grad(true);
    sharded(torch::ones({4, 8})).sum().backward();
    for (const auto& shard : model->ptr(0)->parameters()) EXPECT_TRUE(shard.grad().defined());
  });
}

TEST(ShardedPasses, BuffersAreRankZeros) {
  struct BufferedImpl : nn::Module {
    explicit BufferedImpl(float value)
        : linear(register_module("linear", nn::Linear(2, 2))),
          buffer(register_buffer("buffer", torch::full({3}, value))) {}
    torch::Tensor forward(const torch::Tensor& x) { return linear(x) * buffer.sum(); }
    nn::Linear linear;
    torch::Tensor buffer;
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<BufferedImpl>(static_cast<float>(1 + group.rank()));
    FullyShardedDataParallel sharded(model, group);
    EXPECT_TRUE(torch::equal(model->buffer, torch::ones({3})));
  });
}

TEST(ShardedPasses, UnitsMadeByFullyShardJoinTheRoot) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto reference = blocks(3);
    fill_values(*reference);
    nn::Sequential net;
    for (int i = 0; i < 3; ++i) {
      Block block;
      const torch::NoGradGuard no_grad;
      for (std::size_t p = 0; p < block->parameters().size(); ++p)
        block->parameters()[p].copy_(reference->ptr(static_cast<std::size_t>(i))->parameters()[p]);
      Block same = fully_shard(block, group);
      EXPECT_EQ(same.ptr(), block.ptr());
      net->push_back(i < 2 ? same : block);
    }
    FullyShardedDataParallel sharded(net, group);
    EXPECT_EQ(unit_of(net->parameters()[4])->parameters()[0].name, "1.up.weight");
    sharded(torch::ones({4, 8})).sum().backward();
    EXPECT_EQ(statistics(*net).gathers, 5U);
    EXPECT_TRUE(are_equal(whole(*net), copies(reference->parameters())));
  });
}

TEST(ShardedPasses, OneRankAloneTrains) {
  run_ranks(As::Threads, 1, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    for (int step = 0; step < 2; ++step) sharded(torch::ones({4, 8})).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().size(0), 20);
  });
}

TEST(ShardedPasses, FiveRanksAgreeWithOneProcess) {
  run_ranks(As::Threads, 5, [](ProcessGroup& group) {
    auto reference = blocks(2);
    fill_values(*reference);
    const auto batch = numbers({10, 8}, 3);
    reference->forward(batch).square().mean().backward();
    auto model = blocks(2);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    sharded(batch.narrow(0, 2 * group.rank(), 2)).square().mean().backward();
    for (std::size_t i = 0; i < reference->parameters().size(); ++i) {
      const auto gradient = reference->parameters()[i].grad();
      const auto rows = shard::rows_of(gradient.size(0), group.rank(), 5);
      EXPECT_TRUE(torch::allclose(model->parameters()[i].grad(),
                                  gradient.narrow(0, rows.first, rows.count), 1e-5, 1e-7));
    }
  });
}

TEST(ShardedPasses, ProcessesTrainToo) {
  run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      sharded(numbers({4, 8}, seed(group, step))).square().mean().backward();
      optimizer.step();
    }
  });
}

}  // namespace
}  // namespace weft::testing
