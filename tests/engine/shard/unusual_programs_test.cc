// SPDX-License-Identifier: Apache-2.0
// Sharded models in programs that are written in unusual ways: mixed dtypes, parameters without
// elements, passes in another order, values that change between passes.
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/core/InferenceMode.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/optim/adamw.h>

#include <weft/checkpoint.h>
#include <weft/tests/harness/folder.h>
#include <weft/training.h>

#include "two_ranks.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;

// Trains the same model with DistributedDataParallel and sharded, and expects equal bits.
template <class Model>
void expect_as_ddp(ProcessGroup& group, const FullyShardOptions& options = {}) {
  const auto train = [&](auto& wrapped, nn::Module& model) {
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      wrapped(batch_of(group, step)).square().mean().backward();
      optimizer.step();
    }
  };
  const auto reference = std::make_shared<Model>();
  fill_values(*reference);
  DistributedDataParallel ddp(reference, group);
  train(ddp, *reference);
  const auto model = std::make_shared<Model>();
  fill_values(*model);
  FullyShardedDataParallel sharded(model, group, options);
  train(sharded, *model);
  EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
}

struct MixedImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::linear(x, single).to(torch::kDouble) * scale.to(torch::kDouble);
    return torch::linear(y, twice) + half.to(torch::kDouble) + empty.sum() +
           steps.to(torch::kDouble).sum() + nothing.sum();
  }
  torch::Tensor single = register_parameter("single", torch::ones({6, 8}));
  torch::Tensor twice = register_parameter("twice", torch::ones({3, 6}, torch::kDouble));
  torch::Tensor half = register_parameter("half", torch::ones({3}, torch::kBFloat16));
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  torch::Tensor empty = register_parameter("empty", torch::ones({0, 4}));
  torch::Tensor nothing = register_parameter("nothing", torch::ones({4, 0}, torch::kDouble));
  torch::Tensor steps =
      register_parameter("steps", torch::ones({5}, torch::kLong), /*requires_grad=*/false);
};

TEST(UnusualPrograms, ParametersOfManyDtypesAndShapesTrain) {
  on_two_ranks([](ProcessGroup& group) { expect_as_ddp<MixedImpl>(group); });
}

TEST(UnusualPrograms, AUnitMayHaveNoElements) {
  struct EmptyImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return x + weight.sum(); }
    torch::Tensor weight = register_parameter("weight", torch::ones({0, 3}));
  };
  struct AroundImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return b->forward(empty->forward(a(x))); }
    Block a = register_module("a", Block());
    std::shared_ptr<EmptyImpl> empty = register_module("empty", std::make_shared<EmptyImpl>());
    Block b = register_module("b", Block());
  };
  on_two_ranks([](ProcessGroup& group) {
    expect_as_ddp<AroundImpl>(group);
    expect_as_ddp<AroundImpl>(group, {.reshard_after_forward = false});
  });
  run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    const auto model = std::make_shared<EmptyImpl>();
    FullyShardedDataParallel sharded(model, group);
    sharded(torch::ones({2}, torch::requires_grad())).sum().backward();
    EXPECT_EQ(model->weight.sizes(), (std::vector<std::int64_t>{0, 3}));
  });
}

TEST(UnusualPrograms, ComplexParametersTrain) {
  struct ComplexImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return torch::view_as_real(x * turn).square(); }
    torch::Tensor turn = register_parameter("turn", torch::ones({8}, torch::kComplexFloat));
  };
  on_two_ranks([](ProcessGroup& group) {
    const auto gradient = [&](auto& wrapped, nn::Module& model) {
      wrapped(batch_of(group, 0)).sum().backward();
      return model.parameters()[0].grad();
    };
    const auto reference = std::make_shared<ComplexImpl>();
    DistributedDataParallel ddp(reference, group);
    const auto expected = gradient(ddp, *reference);
    const auto model = std::make_shared<ComplexImpl>();
    FullyShardedDataParallel sharded(model, group);
    const auto rows = gradient(sharded, *model);
    EXPECT_TRUE(torch::equal(rows, expected.narrow(0, 4 * group.rank(), 4)));
  });
}

// Modules in the tree of modules more than once, and one that no parameter belongs to.
TEST(UnusualPrograms, ATreeMayNameAModuleTwice) {
  struct TwiceImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return one(two(torch::relu(one(x)))); }
    Block one = register_module("one", Block());
    Block two = register_module("two", one);
    nn::ModuleList list = register_module("list", nn::ModuleList(one, nn::ModuleList(two)));
    nn::Sequential none = register_module("none", nn::Sequential());
  };
  on_two_ranks([](ProcessGroup& group) {
    expect_as_ddp<TwiceImpl>(group);
    expect_as_ddp<TwiceImpl>(group, {.units = [](const auto&, const auto&) { return true; }});
  });
}

TEST(UnusualPrograms, ForwardsAndBackwardsMayInterleave) {
  on_two_ranks([](ProcessGroup& group) {
    const auto gradients_of = [&](auto& wrapped, nn::Module& model) {
      auto first = wrapped(batch_of(group, 0)).square().mean();
      auto second = wrapped(batch_of(group, 1)).square().mean();
      {
        const torch::NoGradGuard evaluates;
        wrapped(batch_of(group, 2));
      }
      first.backward();
      auto third = wrapped(batch_of(group, 3)).square().mean();
      second.backward({}, /*retain_graph=*/true);
      third.backward();
      second.backward();
      return gradients(model);
    };
    auto reference = filled_blocks(3);
    // DistributedDataParallel allows no such order, so one process adds up the ranks' gradients.
    std::vector<torch::Tensor> expected;
    for (int rank = 0; rank < 2; ++rank) {
      for (const int which : {0, 1, 1, 3}) {
        const auto batch = numbers({4, 8}, static_cast<std::uint64_t>(100 * which + rank));
        reference->forward(batch).square().mean().backward();
      }
    }
    for (const bool stays : {false, true}) {
      auto net = filled_blocks(3);
      FullyShardedDataParallel sharded(net, group, {.reshard_after_forward = stays});
      gradients_of(sharded, *net);
      const auto parameters = reference->parameters();
      const auto shards = net->parameters();
      for (std::size_t i = 0; i < shards.size(); ++i) {
        const auto rows = (parameters[i].size(0) + 1) / 2;
        const auto mine = parameters[i].grad().narrow(0, rows * group.rank(), shards[i].size(0));
        EXPECT_TRUE(torch::allclose(2 * shards[i].grad(), mine, 1e-5, 1e-7)) << i;
      }
    }
  });
}

// A penalty that is computed of model->parameters() goes to the rows at once.
TEST(UnusualPrograms, APenaltyOfTheShardsIsThatOfTheWholeModel) {
  struct PenalisedImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) {
      auto loss = block(x).square().mean();
      for (const auto& parameter : parameters()) loss = loss + parameter.square().sum();
      return loss;
    }
    Block block = register_module("block", Block());
  };
  on_two_ranks([](ProcessGroup& group) {
    const auto reference = std::make_shared<PenalisedImpl>();
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group);
    ddp(batch_of(group, 0)).backward();
    const auto model = std::make_shared<PenalisedImpl>();
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    sharded(batch_of(group, 0)).backward();
    const auto shards = model->parameters();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto whole_gradient = reference->parameters()[i].grad();
      const auto rows = (whole_gradient.size(0) + 1) / 2;
      const auto mine = whole_gradient.narrow(0, rows * group.rank(), shards[i].size(0));
      EXPECT_TRUE(torch::allclose(shards[i].grad(), mine, 1e-5, 1e-7)) << i;
    }
  });
}

TEST(UnusualPrograms, TheWrapperMayBeCalledInItsForward) {
  struct RecursiveImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x, int depth) {
      const auto y = block(x);
      return depth == 0 ? y : last((*again)(y, depth - 1));
    }
    Block block = register_module("block", Block()), last = register_module("last", Block());
    FullyShardedDataParallel<RecursiveImpl>* again = nullptr;
  };
  on_two_ranks([](ProcessGroup& group) {
    const auto model = std::make_shared<RecursiveImpl>();
    fill_values(*model);
    const auto before = copies(model->parameters());
    FullyShardedDataParallel<RecursiveImpl> sharded(model, group);
    model->again = &sharded;
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      sharded(batch_of(group, step), 2).sum().backward();
    }
    for (const auto& shard : model->parameters()) EXPECT_TRUE(shard.grad().defined());
    EXPECT_TRUE(are_equal(whole(*model), before));
  });
}

// Values of parameters that are loaded, or written under FullParameters, between passes.
TEST(UnusualPrograms, ALoadBetweenForwardAndBackwardIsRefused) {
  const harness::Folder folder;
  on_two_ranks([&](ProcessGroup& group) {
    auto net = filled_blocks(2);
    FullyShardedDataParallel sharded(net, group);
    const auto saved = whole(*net);
    checkpoint::save_async(folder.path() + "/run", group, {{"model", *net}}).wait();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
    for (const bool stays : {true, false}) {
      auto loss = sharded(batch_of(group, 0)).square().mean();
      if (stays) {
        checkpoint::load(folder.path() + "/run", group, {{"model", *net}});
      } else {
        const FullParameters full(*net, /*writable=*/true);
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.mul_(2);
      }
      const Error error = error_of([&] { loss.backward(); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_THAT(error.text(), HasSubstr("changed between a forward and its backward"));
      optimizer.zero_grad();
      sharded(batch_of(group, 0)).square().mean().backward();
      optimizer.step();
    }
    checkpoint::load(folder.path() + "/run", group, {{"model", *net}});
    EXPECT_TRUE(are_equal(whole(*net), saved));
    sharded(batch_of(group, 0)).square().mean().backward();
  });
}

// Of a model that is not sharded libtorch itself finds it: the load counts as a write.
TEST(UnusualPrograms, ALoadOfReplicasBetweenForwardAndBackwardIsRefused) {
  const harness::Folder folder;
  on_two_ranks([&](ProcessGroup& group) {
    nn::Sequential net(nn::Linear(8, 4096), nn::Linear(4096, 8));
    fill_values(*net);
    DistributedDataParallel ddp(net, group);
    checkpoint::save_async(folder.path() + "/run", group, {{"model", *net}}).wait();
    auto loss = ddp(batch_of(group, 0)).square().mean();
    checkpoint::load(folder.path() + "/run", group, {{"model", *net}});
    try {
      loss.backward();
      ADD_FAILURE() << "it computed with other values than the forward";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
    }
  });
}

// Both the gradients that no_sync() keeps and those that a backward averages.
TEST(UnusualPrograms, AGradientMayBeTheParameterItself) {
  struct Penalty : torch::autograd::Function<Penalty> {
    static torch::Tensor forward(torch::autograd::AutogradContext* context,
                                 const torch::Tensor& weight) {
      context->save_for_backward({weight});
      return 0.5 * weight.square().sum();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list&) {
      return context->get_saved_variables();
    }
  };
  struct PenalizedImpl : nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return x.sum() + Penalty::apply(weight); }
    torch::Tensor weight = register_parameter("weight", torch::full({4, 3}, 2.0));
  };
  on_two_ranks([](ProcessGroup& group) {
    const auto model = std::make_shared<PenalizedImpl>();
    FullyShardedDataParallel sharded(model, group);
    for (const bool quiet : {true, false}) {
      const auto local = sharded.no_sync(quiet);
      sharded(torch::ones({2})).backward();
    }
    const auto shard = model->parameters()[0];
    EXPECT_TRUE(torch::equal(shard.grad(), torch::full_like(shard, 4)));
  });
}

// Rank 1 of 2 has no rows of the last layer.
struct NarrowImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  nn::Linear first = register_module("first", nn::Linear(8, 5));
  nn::Linear last = register_module("last", nn::Linear(5, 1));
};

TEST(UnusualPrograms, FusedAdamWStepsShardsAsReplicas) {
  const harness::Folder folder;
  on_two_ranks([&](ProcessGroup& group) {
    const auto train = [&](auto& wrapped, FusedAdamW& optimizer, int from, int to) {
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        wrapped(batch_of(group, step)).square().mean().backward();
        optimizer.step();
      }
    };
    const torch::optim::AdamWOptions options(0.05);
    const auto reference = std::make_shared<NarrowImpl>();
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group);
    FusedAdamW plain(reference->parameters(), options);
    train(ddp, plain, 0, 3);

    const auto model = std::make_shared<NarrowImpl>();
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    FusedAdamW optimizer(model->parameters(), options);
    train(sharded, optimizer, 0, 3);
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));

    // Its state goes to a model that is not sharded, and back, in both forms of checkpoints.
    const auto other = std::make_shared<NarrowImpl>();
    DistributedDataParallel other_ddp(other, group);
    FusedAdamW other_optimizer(other->parameters(), options);
    const std::vector<checkpoint::Part> parts = {{"model", *model}, {"optimizer", optimizer}};
    checkpoint::save_async(folder.path() + "/run", group, parts).wait();
    checkpoint::load(folder.path() + "/run", group,
                     {{"model", *other}, {"optimizer", other_optimizer}});
    checkpoint::save(folder.path() + "/file", group,
                     {{"model", *other}, {"optimizer", other_optimizer}});
    train(sharded, optimizer, 3, 5);
    checkpoint::load(folder.path() + "/file", group, parts);
    train(sharded, optimizer, 3, 5);
    train(other_ddp, other_optimizer, 3, 5);
    train(ddp, plain, 3, 5);
    EXPECT_TRUE(are_equal(copies(other->parameters()), copies(reference->parameters())));
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
  });
}

// A forward that is left by an exception, on all ranks, at any of its units.
TEST(UnusualPrograms, ExceptionsAnywhereInForwardLeaveItUsable) {
  struct InterruptedImpl : nn::Module {
    torch::Tensor forward(torch::Tensor x) {
      for (int i = 0; i < 4; ++i) {
        if (i == interrupted) throw std::runtime_error("interrupted");
        x = parts[i]->as<Block>()->forward(x);
      }
      return x;
    }
    nn::ModuleList parts =
        register_module("parts", nn::ModuleList(Block(), Block(), Block(), Block()));
    int interrupted = -1;
  };
  on_two_ranks([](ProcessGroup& group) {
    for (const bool stays : {false, true}) {
      const auto model = std::make_shared<InterruptedImpl>();
      fill_values(*model);
      FullyShardedDataParallel sharded(model, group,
                                       {.reshard_after_forward = !stays, .prefetch = 2});
      sharded(batch_of(group, 0)).square().mean().backward();
      const auto expected = gradients(*model);
      for (int where = 0; where < 5; ++where) {
        model->zero_grad();
        auto loss = sharded(batch_of(group, 0)).square().mean();
        model->interrupted = where;
        if (where < 4) {
          EXPECT_THROW(sharded(batch_of(group, 1)), std::runtime_error);
          const torch::NoGradGuard evaluates;
          EXPECT_THROW(sharded(batch_of(group, 1)), std::runtime_error);
        }
        model->interrupted = -1;
        loss.backward();  // of the forward before
        EXPECT_TRUE(are_equal(gradients(*model), expected)) << where;
      }
    }
  });
}

TEST(UnusualPrograms, AWrapperMadeInInferenceModeEvaluates) {
  on_two_ranks([](ProcessGroup& group) {
    auto reference = filled_blocks(2), net = filled_blocks(2);
    const c10::InferenceMode inference;
    FullyShardedDataParallel sharded(net, group);
    for (int step = 0; step < 2; ++step) {
      const auto x = batch_of(group, step);
      EXPECT_TRUE(torch::equal(sharded(x), reference->forward(x)));
    }
  });
}

// The engine looks for NaN in what each node returns, before the average has come.
TEST(UnusualPrograms, AnomaliesAreDetectedInAveragesAndNotInFreshMemory) {
  const torch::autograd::DetectAnomalyGuard detects;
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(1);
    FullyShardedDataParallel sharded(net, group);
    std::vector<torch::Tensor> expected;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      {
        std::vector<torch::Tensor> used;  // memory that is freed with NaN in it
        for (std::int64_t elements = 1; elements < 400; ++elements)
          used.push_back(torch::full({elements}, std::numeric_limits<float>::quiet_NaN()));
      }
      sharded(batch_of(group, 0)).square().mean().backward();
      if (step == 0) expected = gradients(*net);
      EXPECT_TRUE(are_equal(gradients(*net), expected));
    }
    auto loss = (sharded(batch_of(group, 0)) * std::numeric_limits<float>::infinity()).sum() * 0;
    EXPECT_ANY_THROW(loss.backward());
  });
}

TEST(UnusualPrograms, OnlyFrozenParametersEvaluateAndTakeGradientsOfInputs) {
  on_two_ranks([](ProcessGroup& group) {
    auto net = filled_blocks(2);
    for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
    FullyShardedDataParallel sharded(net, group);
    auto reference = filled_blocks(2);
    for (int step = 0; step < 2; ++step) {
      auto x = batch_of(group, step).requires_grad_(), y = x.detach().clone().requires_grad_();
      sharded(x).square().sum().backward();
      reference->forward(y).square().sum().backward();
      EXPECT_TRUE(torch::equal(x.grad(), y.grad()));
      for (const auto& shard : net->parameters()) EXPECT_FALSE(shard.grad().defined());
    }
  });
}

}  // namespace
}  // namespace weft::testing
