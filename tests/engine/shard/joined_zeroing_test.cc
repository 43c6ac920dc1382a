// SPDX-License-Identifier: Apache-2.0
// weft::join of sharded models whose gradients are zeroed at unusual moments, or not at all: ranks
// that have run out step as those do that have inputs.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <weft/optim.h>
#include <weft/tests/harness/ranks.h>

#include "joined_models.h"

namespace weft::testing::joined {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
namespace nn = torch::nn;
using namespace torch::optim;

// Rank 0 has no inputs and has all rows of the last layer, of which rank 1 has none. `steps` runs
// on rank 1, and in one process that counts rank 0's gradients as zeros.
template <class Make, class Steps>
void expect_as_alone(const Make& make, const Steps& steps) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    const auto net = [] { return nn::Sequential(nn::Linear(3, 4), nn::Linear(4, 1)); };
    nn::Sequential model = net(), plain = net();
    fill_values(*model);
    fill_values(*plain);
    FullyShardedDataParallel sharded(model, group);
    auto optimizer = make(model->parameters());
    auto plain_optimizer = make(plain->parameters());
    const auto loss_of = [](auto& wrapped, int step, double divisor) {
      return wrapped(numbers({2, 3}, static_cast<std::uint64_t>(step))).sum() / divisor;
    };
    join(sharded, optimizer, [&] {
      if (group.rank() == 0) return;
      steps([&](int step) { return loss_of(sharded, step, 1); }, *model, optimizer);
    });
    const auto call = [&](const torch::Tensor& x) { return plain->forward(x); };
    steps([&](int step) { return loss_of(call, step, 2); }, *plain, plain_optimizer);
    expect_close(whole(*model), copies(plain->parameters()));
  });
}

template <class Steps>
void expect_as_alone_with_all(const Steps& steps) {
  using Parameters = std::vector<torch::Tensor>;
  const auto check = [&](const auto& make, const std::string& name) {
    SCOPED_TRACE(name);
    expect_as_alone(make, steps);
  };
  check([](Parameters all) { return SGD(all, SGDOptions(0.1).momentum(0.9)); }, "momentum");
  check([](Parameters all) { return SGD(all, SGDOptions(0.1).weight_decay(0.1)); }, "decay");
  check([](Parameters all) { return Adam(all, AdamOptions(0.1)); }, "Adam");
  check([](Parameters all) { return RMSprop(all, RMSpropOptions(0.1)); }, "RMSprop");
  check([](Parameters all) { return Adagrad(all, AdagradOptions(0.1)); }, "Adagrad");
  check([](Parameters all) { return FusedSGD(all, SGDOptions(0.1).momentum(0.9)); }, "FusedSGD");
  check([](Parameters all) { return FusedAdamW(all, AdamWOptions(0.1)); }, "FusedAdamW");
}

template <class Steps>
void expect_as_alone_with_momentum(const Steps& steps) {
  expect_as_alone(
      [](std::vector<torch::Tensor> all) { return SGD(all, SGDOptions(0.1).momentum(0.9)); },
      steps);
}

// The backward of step 1 is left out.
class ZeroedBefore : public ::testing::TestWithParam<bool> {};  // whether gradients are dropped
INSTANTIATE_TEST_SUITE_P(, ZeroedBefore, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Dropped" : "Zeroed"; });

TEST_P(ZeroedBefore, AStepWithoutABackward) {
  expect_as_alone_with_all([](const auto& loss, nn::Module&, auto& optimizer) {
    for (int step = 0; step < 4; ++step) {
      const torch::Tensor value = loss(step);
      optimizer.zero_grad(GetParam());
      if (step != 1) value.backward();
      optimizer.step();
    }
  });
}

TEST_P(ZeroedBefore, AForwardWithoutABackward) {
  expect_as_alone_with_momentum([](const auto& loss, nn::Module& model, auto& optimizer) {
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 0) {
        optimizer.zero_grad(GetParam());
      } else {
        model.zero_grad(GetParam());
      }
      const torch::Tensor value = loss(step);
      if (step != 1) value.backward();
      optimizer.step();
    }
  });
}

TEST_P(ZeroedBefore, AStepWhoseBackwardIsThrownAway) {
  expect_as_alone_with_all([](const auto& loss, nn::Module&, auto& optimizer) {
    for (int step = 0; step < 4; ++step) {
      loss(step).backward();
      if (step == 1) optimizer.zero_grad(GetParam());
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST_P(ZeroedBefore, AStepByTheModule) {
  expect_as_alone_with_momentum([](const auto& loss, nn::Module& model, auto& optimizer) {
    for (int step = 0; step < 4; ++step) {
      loss(step).backward();
      if (step == 2) clip_grad_norm_(model, 0.1);
      optimizer.step();
      if (step != 1) model.zero_grad(GetParam());
    }
  });
}

// Rank 1 zeroes what rank 0 has not yet received of the first backward; the second one leaves the
// parameter `one` out.
TEST_P(ZeroedBefore, ASecondBackwardOfAForward) {
  struct TwoImpl : nn::Module {
    std::vector<torch::Tensor> forward() { return {one.sum(), two.sum()}; }
    torch::Tensor one = register_parameter("one", torch::ones({4}));
    torch::Tensor two = register_parameter("two", torch::ones({4}));
  };
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto model = std::make_shared<TwoImpl>();
    FullyShardedDataParallel sharded(model, group);
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    join(sharded, optimizer, [&] {
      if (group.rank() == 0) return;
      const std::vector<torch::Tensor> outputs = sharded();
      outputs[0].backward({}, /*retain_graph=*/true);
      model->zero_grad(GetParam());
      outputs[1].backward();
      optimizer.step();
    });
    expect_close(whole(*model), {torch::ones({4}), torch::full({4}, 0.95)});
  });
}

// Gradients that no_sync() has kept are dropped with the rest, also by a rank that ran out
// meanwhile.
TEST_P(ZeroedBefore, WhatNoSyncHasKeptIsAveraged) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2), plain = blocks(2);
    fill_values(*model);
    fill_values(*plain);
    FullyShardedDataParallel sharded(model, group);
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    SGD plain_optimizer(plain->parameters(), SGDOptions(0.1));
    const auto first_of = [&](auto& wrapped, int rank) {
      return wrapped(inputs(0, rank)).square().mean();
    };
    join(sharded, optimizer, [&] {
      {
        const auto quiet = sharded.no_sync();
        first_of(sharded, group.rank()).backward();
      }
      if (group.rank() == 0) return;
      optimizer.zero_grad(GetParam());
      sharded(inputs(1, 1)).square().mean().backward();
      optimizer.step();
    });
    (plain->forward(inputs(1, 1)).square().mean() / 2).backward();
    plain_optimizer.step();
    expect_close(whole(*model), copies(plain->parameters()));
  });
}

// Gradients of several backwards add up, with steps between them. Rank 1 has no rows of the last
// layer, so none that are not zero.
TEST(NeverZeroed, GradientsAddUp) {
  expect_as_alone_with_momentum([](const auto& loss, nn::Module& model, auto& optimizer) {
    for (int step = 0; step < 4; ++step) {
      loss(step).backward();
      if (step == 1) clip_grad_norm_(model, 0.1);
      optimizer.step();
    }
  });
}

TEST(ZeroedByTheModule, InAStepWithoutABackwardIsRefused) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    const Error error = error_of([&] {
      join(sharded, optimizer, [&] {
        if (group.rank() == 0) return;
        for (int step = 0; step < 3; ++step) {
          const auto loss = sharded(inputs(step, 1)).square().mean();
          if (step != 0) model->zero_grad(/*set_to_none=*/false);
          if (step != 1) loss.backward();
          optimizer.step();
        }
      });
    });
    EXPECT_EQ(error.blame(), group.rank() == 1 ? Blame::Caller : Blame::Cancelled) << error.what();
    EXPECT_THAT(error.text(), ::testing::HasSubstr("Call the optimizer's zero_grad()"));
  });
}

}  // namespace
}  // namespace weft::testing::joined
