// SPDX-License-Identifier: Apache-2.0
// What sharding refuses, with which sentence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/autograd.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/sgd.h>

#include <weft/engine/optim/averaging.h>
#include <weft/engine/zero/zero.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace nn = torch::nn;

// The error of both ranks, which must be a Caller error.
void expect_refusal(const std::function<void(ProcessGroup&)>& call, const std::string& sentence) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    const Error error = error_of([&] { call(group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr(sentence));
  });
}

struct LentImpl : nn::Module {
  explicit LentImpl(const torch::Tensor& lent) : weight(register_parameter("weight", lent)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
  torch::Tensor weight;
};

TEST(ShardedRefusals, AParameterOutsideOfForwardAndBackward) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(2);
    const auto block = std::dynamic_pointer_cast<BlockImpl>(net->ptr(0));
    FullyShardedDataParallel sharded(net, group);
    const auto expect_named = [&](const std::function<void()>& call) {
      const Error error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(),
                  AllOf(HasSubstr("'0.up.weight'"), HasSubstr("outside of the forward"),
                        HasSubstr("FullParameters")));
    };
    expect_named([&] { block->up->weight.sum(); });
    expect_named([&] { net->forward(torch::ones({4, 8})); });
    auto loss = sharded(torch::ones({4, 8})).sum();
    expect_named([&] { block->up->weight.sum(); });
    loss.backward();
    expect_named([&] { block->up->weight.sum(); });
    // Memory that bypasses libtorch's operators.
    try {
      block->up->weight.data_ptr<float>();
      ADD_FAILURE();
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("parameter '0.up.weight' is not gathered"));
    }
  });
}

TEST(ShardedRefusals, AWrapperThatWasMovedFrom) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    nn::Linear net(4, 4);
    FullyShardedDataParallel source(net, group);
    FullyShardedDataParallel sharded = std::move(source);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto expect_refused = [](const std::function<void()>& call) {
      const Error error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("moved from"));
    };
    // NOLINTBEGIN(bugprone-use-after-move)
    expect_refused([&] { source(torch::ones({1, 4})); });
    expect_refused([&] { const auto quiet = source.no_sync(); });
    expect_refused([&] { join(source, optimizer, [] {}); });
    expect_refused([&] { join(source, [] {}); });
    // NOLINTEND(bugprone-use-after-move)
    sharded(torch::ones({1, 4})).sum().backward();
  });
}

TEST(ShardedRefusals, AUnitWithoutARoot) {
  expect_refusal(
      [](ProcessGroup& group) {
        Block block = fully_shard(Block(), group);
        block->forward(torch::ones({4, 8}));
      },
      "through its FullyShardedDataParallel");
}

TEST(ShardedRefusals, ABackwardAfterTheWrapperIsGone) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(1);
    torch::Tensor loss;
    {
      FullyShardedDataParallel sharded(net, group);
      loss = sharded(torch::ones({4, 8})).sum();
    }
    const Error error = error_of([&] { loss.backward(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
  });
}

TEST(ShardedRefusals, SparseGradientsAndMaxNorm) {
  expect_refusal(
      [](ProcessGroup& group) {
        nn::Embedding embedding(nn::EmbeddingOptions(8, 4).sparse(true));
        FullyShardedDataParallel sharded(embedding, group);
      },
      "parameter 'weight' cannot be sharded: its embedding has sparse gradients");
  expect_refusal(
      [](ProcessGroup& group) {
        nn::Embedding embedding(nn::EmbeddingOptions(8, 4).max_norm(1.0));
        FullyShardedDataParallel sharded(embedding, group);
      },
      "max_norm");
}

// Of a lookup that the model's own code makes; inside of no_sync() too, where they would be kept.
TEST(ShardedRefusals, SparseGradientsOfABackward) {
  struct LookupImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) {
      return torch::embedding(rows, x, -1, false, /*sparse=*/true).sum();
    }
    torch::Tensor rows = register_parameter("rows", torch::ones({8, 4}));
  };
  for (const bool quiet : {false, true}) {
    expect_refusal(
        [&](ProcessGroup& group) {
          FullyShardedDataParallel sharded(std::make_shared<LookupImpl>(), group);
          const auto local = sharded.no_sync(quiet);
          sharded(torch::tensor({1, 2})).backward();
        },
        "the gradient of parameter 'rows' is sparse");
  }
}

TEST(ShardedRefusals, ParameterLists) {
  expect_refusal(
      [](ProcessGroup& group) {
        nn::Sequential net(nn::Linear(2, 2));
        net->register_module("list", nn::ParameterList(torch::ones({2}, torch::requires_grad())));
        FullyShardedDataParallel sharded(net, group);
      },
      "ParameterList");
}

TEST(ShardedRefusals, ParametersOnMeta) {
  expect_refusal(
      [](ProcessGroup& group) {
        nn::Sequential net(nn::Linear(2, 2));
        net->register_module("bare", std::make_shared<LentImpl>(torch::ones({2}, torch::kMeta)));
        FullyShardedDataParallel sharded(net, group);
      },
      "meta");
}

TEST(ShardedRefusals, OptionsThatMakeNoSense) {
  expect_refusal(
      [](ProcessGroup& group) {
        FullyShardedDataParallel sharded(blocks(1), group, {.prefetch = -1});
      },
      "FullyShardOptions::prefetch is -1");
  expect_refusal(
      [](ProcessGroup& group) {
        FullyShardedDataParallel sharded(blocks(1), group, {.param_dtype = torch::kInt});
      },
      "Int is no floating-point dtype");
  expect_refusal(
      [](ProcessGroup& group) { fully_shard(Block(), group, {.units = units_of<Block>()}); },
      "makes one unit");
  expect_refusal(
      [](ProcessGroup& group) { FullyShardedDataParallel sharded(Block(nullptr), group); },
      "the module is empty");
  expect_refusal([](ProcessGroup&) { FullyShardedDataParallel sharded(blocks(1), {}); },
                 "the group is empty");
}

TEST(ShardedRefusals, RanksWithOtherModelsOrOptions) {
  expect_refusal(
      [](ProcessGroup& group) {
        FullyShardedDataParallel sharded(blocks(1, 8, 20 + group.rank()), group);
      },
      "differs between ranks");
  expect_refusal(
      [](ProcessGroup& group) {
        FullyShardedDataParallel sharded(blocks(1), group, {.prefetch = group.rank()});
      },
      "FullyShardOptions::prefetch 1 where rank 0 has FullyShardOptions::prefetch 0");
}

TEST(ShardedRefusals, AModelThatIsShardedTwice) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        FullyShardedDataParallel again(net, group);
      },
      "belongs to another FullyShardedDataParallel already");
  expect_refusal(
      [](ProcessGroup& group) {
        Block block;
        fully_shard(block, group);
        fully_shard(block, group);
      },
      "no parameters that are not sharded already");
}

TEST(ShardedRefusals, ChoosingNoUnitIsWarnedOf) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(2);
    const FullyShardedDataParallel sharded(net, group, {.units = units_of<nn::LSTM>()});
    if (group.rank() == 0)
      EXPECT_THAT(harness::LogWatch::current().text(), HasSubstr("has chosen no submodule"));
  });
}

// They would take the rows of the ranks, which may have one shape, for copies of each other.
TEST(ShardedRefusals, WhoeverTakesShardsForCopies) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(2);
        const FullyShardedDataParallel sharded(net, group);
        const DistributedDataParallel ddp(net, group);
      },
      "parameter '0.up.weight' is sharded, and each rank has other rows of it");
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(2);
        const FullyShardedDataParallel sharded(net, group);
        const ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group,
                                                              torch::optim::SGDOptions(0.1));
      },
      "use a torch::optim optimizer");
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(2);
        const FullyShardedDataParallel sharded(net, group);
        average_parameters(net->parameters(), group);
      },
      "average_parameters: parameter 0 is sharded");
}

TEST(ShardedRefusals, AUnitOfAnotherGroup) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const ProcessGroup other = group.new_group({0, 1});
    nn::Sequential net(fully_shard(Block(), other));
    const Error error = error_of([&] { FullyShardedDataParallel sharded(net, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("over another group"));
  });
}

TEST(ShardedRefusals, AWeightThatAUnitSharesWithTheOutside) {
  expect_refusal(
      [](ProcessGroup& group) {
        nn::Linear linear(8, 8);
        nn::Sequential net;
        net->push_back(std::make_shared<LentImpl>(linear->weight));
        net->push_back(fully_shard(linear, group));
        FullyShardedDataParallel sharded(net, group);
      },
      "innermost unit that contains all its uses");
}

TEST(ShardedRefusals, WritesDuringForward) {
  struct ClampedImpl : nn::Module {
    ClampedImpl() : linear(register_module("linear", nn::Linear(8, 8))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      {
        const torch::NoGradGuard no_grad;
        linear->weight.clamp_(-1, 1);
      }
      return linear(x);
    }
    nn::Linear linear;
  };
  expect_refusal(
      [](ProcessGroup& group) {
        auto model = std::make_shared<ClampedImpl>();
        FullyShardedDataParallel sharded(model, group);
        sharded(torch::ones({4, 8}));
      },
      "parameter 'linear.weight' was written in place");
}

TEST(ShardedRefusals, ABackwardWithCreateGraphThroughParameters) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        sharded(torch::ones({4, 8})).sum().backward({}, true, /*create_graph=*/true);
      },
      "create_graph");
}

TEST(ShardedRefusals, AChangeBetweenForwardAndBackward) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(2);
        FullyShardedDataParallel sharded(net, group);
        const auto loss = sharded(torch::ones({4, 8})).sum();
        {
          const torch::NoGradGuard no_grad;
          for (auto& shard : net->parameters()) shard.add_(1);
        }
        loss.backward();
      },
      "changed between a forward and its backward");
}

TEST(ShardedRefusals, AChangeBetweenTwoForwardsOfOneBackward) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(2);
        FullyShardedDataParallel sharded(net, group);
        const auto first = sharded(torch::ones({4, 8})).sum();
        {
          const torch::NoGradGuard no_grad;
          for (auto& shard : net->parameters()) shard.add_(1);
        }
        (first + sharded(torch::ones({4, 8})).sum()).backward();
      },
      "changed between a forward and its backward");
}

TEST(ShardedRefusals, ACastAfterSharding) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        net->to(torch::kDouble);
        sharded(torch::ones({4, 8}, torch::kDouble));
      },
      "the shard of parameter '0.up.weight' is gone: the module's parameters were replaced, moved "
      "or cast");
}

TEST(ShardedRefusals, AForwardInsideABackward) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        auto x = torch::ones({4, 8}).requires_grad_();
        auto y = x * 2;
        y.register_hook([&](const torch::Tensor&) { sharded(torch::ones({4, 8})); });
        y.sum().backward();
      },
      "inside of a backward");
}

TEST(ShardedRefusals, AForwardWithGradientsUnderFullParameters) {
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        const FullParameters full(*net);
        sharded(torch::ones({4, 8}));
      },
      "FullParameters holds");
}

TEST(ShardedRefusals, RanksThatUseDifferentUnitsAreAllTold) {
  struct ForkImpl : nn::Module {
    ForkImpl()
        : a(register_module("a", nn::Linear(8, 8))), b(register_module("b", nn::Linear(8, 8))) {}
    torch::Tensor forward(const torch::Tensor& x, bool left) { return left ? a(x) : b(x); }
    nn::Linear a, b;
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = std::make_shared<ForkImpl>();
    FullyShardedDataParallel sharded(model, group);
    const Error error = error_of([&] {
      sharded(torch::ones({4, 8}), group.rank() == 0).sum().backward();
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("of a FullyShardedDataParallel"));
  });
}

TEST(ShardedRefusals, AJoin) {
  const std::string sentence = "join: a sharded model is joined together with its optimizer";
  expect_refusal(
      [](ProcessGroup& group) {
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        join(sharded, [] { FAIL(); });
      },
      sentence);
  // Also where join is told of another object only.
  expect_refusal(
      [](ProcessGroup& group) {
        nn::Linear head(8, 2);
        DistributedDataParallel ddp(head, group);
        auto net = blocks(1);
        FullyShardedDataParallel sharded(net, group);
        join(ddp, [&] { ddp(sharded(torch::ones({4, 8}))); });
      },
      sentence);
}

TEST(ShardedRefusals, AJoinThatIsOffOnlyRunsTheSteps) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto net = blocks(1);
    FullyShardedDataParallel sharded(net, group);
    join(sharded, [&] { sharded(torch::ones({4, 8})).sum().backward(); }, {.enable = false});
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

// One rank's loss leaves out a unit that the other's uses.
TEST(ShardedRefusals, RanksWhoseBackwardsUseDifferentUnitsAreAllTold) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    struct TwoImpl : nn::Module {
      TwoImpl()
          : a(register_module("a", nn::Linear(8, 8))), b(register_module("b", nn::Linear(8, 8))) {}
      std::vector<torch::Tensor> forward(const torch::Tensor& x) { return {a(x), b(x)}; }
      nn::Linear a, b;
    };
    auto model = std::make_shared<TwoImpl>();
    FullyShardedDataParallel sharded(model, group);
    const Error error = error_of([&] {
      for (int step = 0; step < 2; ++step) {
        const auto outputs = sharded(torch::ones({4, 8}));
        (group.rank() == 0 ? outputs[0] + outputs[1] : outputs[0]).sum().backward();
      }
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("of a FullyShardedDataParallel"));
  });
}

}  // namespace
}  // namespace weft::testing
