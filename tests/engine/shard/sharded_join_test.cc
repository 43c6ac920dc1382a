// SPDX-License-Identifier: Apache-2.0
// weft::join of sharded models: ranks that have run out of inputs go on for the others.
#include <algorithm>
#include <functional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <weft/mesh.h>
#include <weft/optim.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

#include "joined_models.h"

namespace weft::testing::joined {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// One process trains with the mean over all ranks, where those that have run out count as zeros, or
// not at all.
std::vector<torch::Tensor> trained_alone(const std::vector<int>& steps, bool by_initial = true) {
  auto model = blocks(3);
  fill_values(*model);
  AdamW optimizer(model->parameters(), AdamWOptions(0.01));
  const int most = *std::max_element(steps.begin(), steps.end());
  for (int step = 0; step < most; ++step) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (step + 1));
    const auto active =
        std::count_if(steps.begin(), steps.end(), [&](int count) { return count > step; });
    const auto divisor = static_cast<double>(by_initial ? std::ssize(steps) : active);
    torch::Tensor loss = torch::zeros({});
    for (int rank = 0; rank < std::ssize(steps); ++rank) {
      if (step < steps[static_cast<std::size_t>(rank)])
        loss = loss + model->forward(inputs(step, rank)).square().mean() / divisor;
    }
    loss.backward();
    clip_grad_norm_(*model, 0.05);
    optimizer.step();
    optimizer.zero_grad();
  }
  return copies(model->parameters());
}

template <class Over>
std::vector<torch::Tensor> trained_sharded(const Over& over, int rank,
                                           const std::vector<int>& steps, JoinOptions options = {},
                                           FullyShardOptions sharding = {}) {
  auto model = blocks(3);
  fill_values(*model);
  FullyShardedDataParallel sharded(model, over, std::move(sharding));
  AdamW optimizer(model->parameters(), AdamWOptions(0.01));
  join(
      sharded, optimizer,
      [&] { train(sharded, *model, optimizer, rank, steps[static_cast<std::size_t>(rank)]); },
      options);
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), model->parameters().size());
  EXPECT_EQ(optimizer.state().size(), model->parameters().size());
  return whole(*model);
}

struct Setting {
  As as;
  std::vector<int> steps;  // by rank
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << harness::name(setting.as); }

class ShardedJoin : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(
    , ShardedJoin,
    ::testing::Values(Setting{As::Threads, {4, 2}}, Setting{As::Threads, {0, 3}},
                      Setting{As::Threads, {1, 5, 3}}, Setting{As::Threads, {2, 0, 4, 4}},
                      Setting{As::Processes, {0, 3}}, Setting{As::Processes, {1, 4, 2}}),
    [](const auto& info) {
      std::string name = harness::name(info.param.as);
      for (const int steps : info.param.steps) name += std::to_string(steps);
      return name;
    });

TEST_P(ShardedJoin, TrainsAsOneProcessWithTheSameInputs) {
  const std::vector<int>& steps = GetParam().steps;
  run_ranks(GetParam().as, static_cast<int>(steps.size()), [&](ProcessGroup& group) {
    expect_close(trained_sharded(group, group.rank(), steps), trained_alone(steps));
  });
}

#if WEFT_TEST_GLOO
TEST(ShardedJoinSteps, AreToldOverGloo) {
  run_ranks(As::Threads, 3,
            [](ProcessGroup& group) {
              const std::vector<int> steps = {2, 0, 3};
              expect_close(trained_sharded(group, group.rank(), steps), trained_alone(steps));
              const Mesh mesh(group, {{"copies", 1}, {"rows", -1}});
              expect_close(trained_sharded(mesh, group.rank(), steps), trained_alone(steps));
            },
            {.backend = "gloo"});
}
#endif

// Parameters are gathered in another dtype, and kept after forward.
TEST(ShardedJoinSteps, MayComputeInAnotherDtype) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const std::vector<int> steps = {3, 1};
    const FullyShardOptions sharding{.reshard_after_forward = false,
                                     .param_dtype = torch::kDouble,
                                     .reduce_dtype = torch::kDouble,
                                     .prefetch = 0};
    expect_close(trained_sharded(group, group.rank(), steps, {}, sharding), trained_alone(steps));
  });
}

TEST(ShardedJoinSteps, AreDividedByTheRanksThatHaveInputs) {
  run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    const std::vector<int> steps = {0, 3, 1};
    const JoinOptions options{.divide_by_initial_world_size = false};
    expect_close(trained_sharded(group, group.rank(), steps, options), trained_alone(steps, false));
  });
}

class ShardedJoinOver2x2 : public ::testing::TestWithParam<As> {};
INSTANTIATE_TEST_SUITE_P(, ShardedJoinOver2x2, ::testing::Values(As::Threads, As::Processes),
                         [](const auto& info) { return harness::name(info.param); });

TEST_P(ShardedJoinOver2x2, TrainsAsOneProcessWithTheSameInputs) {
  run_ranks(GetParam(), 4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"copies", 2}, {"rows", -1}});
    for (const std::vector<int>& steps : {std::vector<int>{1, 4, 0, 2}, {3, 3, 3, 1}})
      expect_close(trained_sharded(mesh, group.rank(), steps), trained_alone(steps));
  });
}

// Bits, with two ranks: a sum of two numbers has one order.
TEST(ShardedJoinAndDdp, HaveTheSameBits) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto trained = [&](auto& wrapped, auto& model, auto& optimizer, const auto& joined) {
      joined([&] {
        for (int step = 0; step < 2 + 2 * group.rank(); ++step) {
          optimizer.zero_grad();
          wrapped(inputs(step, group.rank())).square().mean().backward();
          optimizer.step();
        }
      });
      return copies(model->parameters());
    };
    for (const bool by_initial : {true, false}) {
      const JoinOptions options{.divide_by_initial_world_size = by_initial};
      auto replica = blocks(3), model = blocks(3);
      fill_values(*replica);
      fill_values(*model);
      DistributedDataParallel ddp(replica, group);
      FullyShardedDataParallel sharded(model, group);
      AdamW whole_steps(replica->parameters(), AdamWOptions(0.01));
      AdamW steps(model->parameters(), AdamWOptions(0.01));
      const auto expected =
          trained(ddp, replica, whole_steps, [&](const auto& run) { join(ddp, run, options); });
      trained(sharded, model, steps, [&](const auto& run) { join(sharded, steps, run, options); });
      EXPECT_TRUE(are_equal(whole(*model), expected));
    }
  });
}

// Each step of the loop is made of several backwards, of which some are kept and some averaged, and
// gradients are zeroed in the other way.
TEST(ShardedJoinSteps, MayAccumulate) {
  run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    auto model = blocks(2), plain = blocks(2);
    fill_values(*model);
    fill_values(*plain);
    FullyShardedDataParallel sharded(model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1));
    const int rounds[] = {1, 3, 0};
    join(sharded, optimizer, [&] {
      for (int step = 0; step < rounds[group.rank()]; ++step) {
        optimizer.zero_grad(/*set_to_none=*/false);
        for (int part = 0; part < 3; ++part) {
          const auto quiet = sharded.no_sync(part == 0);
          sharded(inputs(3 * step + part, group.rank())).square().mean().backward();
        }
        optimizer.step();
      }
    });
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      for (int rank = 0; rank < 3; ++rank) {
        for (int part = 0; part < 3 && step < rounds[rank]; ++part)
          (plain->forward(inputs(3 * step + part, rank)).square().mean() / 3).backward();
      }
      plain_optimizer.step();
    }
    expect_close(whole(*model), copies(plain->parameters()));
  });
}

// Rank 0 has all rows, and no inputs. Units change from step to step, one batch is skipped, and one
// learning rate is 0.
TEST(ShardedJoinSteps, MayDifferFromEachOther) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    struct TinyImpl : nn::Module {
      TinyImpl()
          : a(register_module("a", nn::Linear(3, 1))), b(register_module("b", nn::Linear(3, 1))) {}
      torch::Tensor forward(const torch::Tensor& x, bool uses_b) {
        return (uses_b ? b(x) * a(x) : a(x)).sum();
      }
      nn::Linear a, b;
    };
    auto model = std::make_shared<TinyImpl>(), plain = std::make_shared<TinyImpl>();
    fill_values(*model);
    fill_values(*plain);
    FullyShardedDataParallel sharded(model, group);
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    torch::optim::SGD optimizer(model->parameters(), options);
    torch::optim::SGD plain_optimizer(plain->parameters(), options);
    const auto run = [&](auto& wrapped, auto& stepped, double divisor) {
      for (int step = 0; step < 5; ++step) {
        stepped.zero_grad();
        stepped.param_groups()[0].options().set_lr(step == 0 ? 0 : 0.1);
        (wrapped(numbers({2, 3}, static_cast<std::uint64_t>(step)), step % 2 == 1) / divisor)
            .backward();
        if (step != 3) stepped.step();
        const torch::NoGradGuard no_grad;
        wrapped(numbers({2, 3}, 9), true);
      }
    };
    const auto call = [&](const torch::Tensor& x, bool uses_b) {
      return plain->forward(x, uses_b);
    };
    join(sharded, optimizer, [&] {
      if (group.rank() == 1) run(sharded, optimizer, 1);
    });
    run(call, plain_optimizer, 2);
    expect_close(whole(*model), copies(plain->parameters()));
  });
}

TEST(ShardedJoinSteps, AreFollowedByOthersInStep) {
  run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    auto model = blocks(4);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group, {.prefetch = 2});
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    for (int epoch = 0; epoch < 3; ++epoch) {
      join(sharded, optimizer,
           [&] { train(sharded, *model, optimizer, group.rank(), (group.rank() + epoch) % 3); });
      train(sharded, *model, optimizer, group.rank(), 3);
    }
    for (const torch::Tensor& value : whole(*model)) {
      const auto first = value.clone();
      group.broadcast(first, 0).wait();
      EXPECT_TRUE(torch::equal(first, value));
    }
  });
}

// Rank 0 has all rows, and learns from the others alone when its optimizer steps.
TEST(ShardedJoinSteps, AreSeenWithEveryOptimizer) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto check = [&](const auto& make, const std::string& name) {
      auto model = std::make_shared<nn::LinearImpl>(3, 1);
      auto plain = std::make_shared<nn::LinearImpl>(3, 1);
      fill_values(*model);
      fill_values(*plain);
      FullyShardedDataParallel sharded(model, group);
      auto optimizer = make(model->parameters());
      auto plain_optimizer = make(plain->parameters());
      const auto run = [](auto& net, auto& stepped, double divisor) {
        for (int step = 0; step < 4; ++step) {
          net.forward(numbers({2, 3}, static_cast<std::uint64_t>(step)))
              .sum()
              .div(divisor)
              .backward();
          if (step != 1) stepped.step();
          stepped.zero_grad(step % 2 == 0);
        }
      };
      join(sharded, optimizer, [&] {
        if (group.rank() == 1) run(sharded, optimizer, 1);
      });
      run(*plain, plain_optimizer, 2);
      SCOPED_TRACE(name);
      expect_close(whole(*model), copies(plain->parameters()));
    };
    using Parameters = std::vector<torch::Tensor>;
    using namespace torch::optim;
    check([](Parameters all) { return SGD(all, SGDOptions(0.1)); }, "SGD");
    check([](Parameters all) { return SGD(all, SGDOptions(0.1).momentum(0.9)); }, "momentum");
    check([](Parameters all) { return Adam(all, AdamOptions(0.1)); }, "Adam");
    check([](Parameters all) { return RMSprop(all, RMSpropOptions(0.1)); }, "RMSprop");
    check([](Parameters all) { return Adagrad(all, AdagradOptions(0.1)); }, "Adagrad");
    check([](Parameters all) { return FusedSGD(all, SGDOptions(0.1)); }, "FusedSGD");
    check([](Parameters all) { return FusedAdamW(all, AdamWOptions(0.1)); }, "FusedAdamW");
  });
}

// Over a mesh, the layers and the model have groups of the same ranks that are not the same.
TEST(ShardedJoinSteps, AddUpStatisticsOverTheAxisThatHasAllRanks) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    for (const bool is_replicated : {false, true}) {
      const Mesh mesh = is_replicated ? Mesh(group, {{"replicate", 2}, {"shard", 1}})
                                      : Mesh(group, {{"shard", 2}});
      nn::Sequential model(nn::Linear(8, 8), nn::BatchNorm1d(8));
      fill_values(*model);
      convert_sync_batch_norm(*model, mesh[is_replicated ? "replicate" : "shard"]);
      FullyShardedDataParallel sharded(model, mesh);
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
      join(sharded, optimizer,
           [&] { train(sharded, *model, optimizer, group.rank(), 1 + 2 * group.rank()); });
      EXPECT_EQ(model[1]->as<nn::BatchNorm1d>()->num_batches_tracked.item<std::int64_t>(), 3);
    }
  });
}

TEST(ShardedJoinSteps, AddUpStatisticsOfTheRanksThatHaveInputs) {
  run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    const auto make = [] {
      return nn::Sequential(nn::Linear(8, 8), nn::BatchNorm1d(8), nn::Linear(8, 8));
    };
    auto model = make(), plain = make();
    fill_values(*model);
    fill_values(*plain);
    convert_sync_batch_norm(*model, group);
    FullyShardedDataParallel sharded(model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
    torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.01));
    const int steps[] = {1, 0, 3};
    join(sharded, optimizer,
         [&] { train(sharded, *model, optimizer, group.rank(), steps[group.rank()]); });
    for (int step = 0; step < 3; ++step) {
      std::vector<torch::Tensor> all;
      for (int rank = 0; rank < 3; ++rank) {
        if (step < steps[rank]) all.push_back(inputs(step, rank));
      }
      plain_optimizer.param_groups()[0].options().set_lr(0.01 / (step + 1));
      const auto output = plain->forward(torch::cat(all));
      (output.square().mean() * static_cast<double>(all.size()) / 3).backward();
      clip_grad_norm_(*plain, 0.05);
      plain_optimizer.step();
      plain_optimizer.zero_grad();
    }
    expect_close(whole(*model), copies(plain->parameters()));
    expect_close({model->buffers()[0], model->buffers()[1]},
                 {plain->buffers()[0], plain->buffers()[1]});
  });
}

// One choice of steps, the same on all ranks; a rank makes only the first few of them.
struct RandomSteps {
  explicit RandomSteps(unsigned seed) : generator(seed) {
    ranks = 2 + pick(3);
    for (int rank = 0; rank < ranks; ++rank) counts.push_back(pick(5));
    for (int step = 0; step < 5; ++step) {
      uses_b.push_back(pick(2) == 1);
      steps.push_back(pick(4) > 0);
      quiet.push_back(pick(3) == 0);
    }
    has_momentum = pick(2) == 1;
    drops = pick(2) == 1;
    zeroes_late = pick(2) == 1;
    sharding.prefetch = pick(3);
    sharding.reshard_after_forward = pick(2) == 1;
    by_initial = pick(2) == 1;
  }
  int pick(int below) { return static_cast<int>(generator() % static_cast<unsigned>(below)); }
  double divisor(int step) const {
    const auto active = std::ranges::count_if(counts, [&](int count) { return count > step; });
    return by_initial ? ranks : static_cast<double>(active);
  }
  torch::optim::SGD optimizer_of(const nn::Module& model) const {
    const double momentum = has_momentum ? 0.9 : 0;
    return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.05).momentum(momentum));
  }
  // Runs a step; `backward` for each rank that takes part.
  void run(int step, torch::optim::Optimizer& optimizer,
           const std::function<void(bool uses_b)>& backward) const {
    const auto at = static_cast<std::size_t>(step);
    if (!zeroes_late) optimizer.zero_grad(drops);
    backward(uses_b[at]);
    if (steps[at] && !quiet[at]) optimizer.step();
    if (zeroes_late && !quiet[at]) optimizer.zero_grad(drops);
  }

  std::minstd_rand generator;
  int ranks;
  std::vector<int> counts;
  std::vector<bool> uses_b, steps, quiet;
  bool has_momentum, drops, zeroes_late, by_initial;
  FullyShardOptions sharding;
};

TEST(ShardedJoinSteps, MayBeAtRandom) {
  for (unsigned seed = 1; seed <= (harness::runs_all_settings() ? 100U : 4U); ++seed) {
    const RandomSteps random(seed);
    run_ranks(As::Threads, random.ranks, [&](ProcessGroup& group) {
      auto model = std::make_shared<BranchesImpl>(), plain = std::make_shared<BranchesImpl>();
      fill_values(*model);
      fill_values(*plain);
      FullyShardedDataParallel sharded(model, group, random.sharding);
      auto optimizer = random.optimizer_of(*model);
      auto plain_optimizer = random.optimizer_of(*plain);
      join(sharded, optimizer,
           [&] {
             for (int step = 0; step < random.counts[static_cast<std::size_t>(group.rank())];
                  ++step) {
               random.run(step, optimizer, [&](bool uses_b) {
                 sharded(inputs(step, group.rank()), uses_b).backward();
               });
             }
           },
           {.divide_by_initial_world_size = random.by_initial});
      for (int step = 0; step < *std::ranges::max_element(random.counts); ++step) {
        random.run(step, plain_optimizer, [&](bool uses_b) {
          for (int rank = 0; rank < random.ranks; ++rank) {
            if (step < random.counts[static_cast<std::size_t>(rank)])
              (plain->forward(inputs(step, rank), uses_b) / random.divisor(step)).backward();
          }
        });
      }
      expect_close(whole(*model), copies(plain->parameters()));
    });
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST(ShardedJoinSteps, LeaveTheBuffersOfARankThatWasActiveLast) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    nn::Sequential model(nn::Linear(8, 8), nn::BatchNorm1d(8));
    FullyShardedDataParallel sharded(model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    join(sharded, optimizer, [&] {
      for (int step = 0; step < group.rank() * 3; ++step)
        sharded(inputs(step, group.rank())).square().mean().backward();
    });
    EXPECT_EQ(model[1]->as<nn::BatchNorm1d>()->num_batches_tracked.item<std::int64_t>(), 3);
  });
}

}  // namespace
}  // namespace weft::testing::joined
