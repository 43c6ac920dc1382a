// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

struct ScalarImpl : torch::nn::Module {
  ScalarImpl() : weight(register_parameter("weight", torch::ones({1}, torch::kDouble))) {}
  torch::Tensor forward(double x) { return weight * x; }
  torch::Tensor weight;
};

TEST(Join, DividesByInitialOrActiveRanks) {
  for (const bool by_initial : {true, false}) {
    harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
      auto net = std::make_shared<ScalarImpl>();
      DistributedDataParallel<ScalarImpl> ddp(net, group);
      std::vector<double> gradients;
      // Rank r makes r + 1 steps with the gradient r + 1.
      join(
          ddp,
          [&] {
            for (int step = 0; step <= group.rank(); ++step) {
              net->zero_grad();
              ddp(group.rank() + 1.0).sum().backward();
              gradients.push_back(net->weight.grad().item<double>());
            }
          },
          JoinOptions{.divide_by_initial_world_size = by_initial});
      const std::vector<double> expected =
          by_initial ? std::vector<double>{2.0, 5.0 / 3, 1.0} : std::vector<double>{2.0, 2.5, 3.0};
      ASSERT_EQ(gradients.size(), static_cast<std::size_t>(group.rank() + 1));
      for (std::size_t i = 0; i < gradients.size(); ++i)
        EXPECT_NEAR(gradients[i], expected[i], 1e-12) << "step " << i;
    });
  }
}

TEST(Join, AllRanksGetTheFinalParameters) {
  for (const bool find_unused : {true, false}) {
    harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
      Mlp net;
      fill(net);
      Mlp plain;
      fill(plain);
      DistributedDataParallel ddp(
          net, group,
          {.bucket_bytes = 100, .first_bucket_bytes = 1, .find_unused_parameters = find_unused});
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      const int steps_of_rank[] = {2, 5, 3};
      join(ddp, [&] {
        for (int step = 0; step < steps_of_rank[group.rank()]; ++step) {
          optimizer.zero_grad();
          ddp(random({2, 6}, static_cast<std::uint64_t>(10 * step + group.rank())))
              .sum()
              .backward();
          optimizer.step();
        }
      });
      // The same in one process: finished ranks count as zeros.
      torch::optim::SGD plain_optimizer(plain->parameters(),
                                        torch::optim::SGDOptions(0.05).momentum(0.9));
      for (int step = 0; step < 5; ++step) {
        plain_optimizer.zero_grad();
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (int rank = 0; rank < 3; ++rank) {
          if (step < steps_of_rank[rank])
            loss = loss +
                   plain(random({2, 6}, static_cast<std::uint64_t>(10 * step + rank))).sum() / 3;
        }
        loss.backward();
        plain_optimizer.step();
      }
      EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-10);
    });
  }
}

TEST(Join, NoSyncStepIsNotReduced) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    join(ddp, [&] {
      for (int step = 0; step < (group.rank() == 0 ? 1 : 3); ++step) {
        net->zero_grad();
        {
          const auto quiet = ddp.no_sync();
          ddp(2.0).sum().backward();
        }
        EXPECT_EQ(net->weight.grad().item<double>(), 2.0);
        ddp(2.0).sum().backward();
        EXPECT_EQ(net->weight.grad().item<double>(), step == 0 ? 4.0 : 2.0);
      }
    });
  });
}

TEST(Join, WarnsOfGradientsThatNoBackwardAverages) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    join(ddp, [&] {
      {
        const auto quiet = ddp.no_sync();
        ddp(2.0).sum().backward();
      }
      if (group.rank() == 1) ddp(2.0).sum().backward();
    });
    if (group.rank() == 0) {
      EXPECT_THAT(harness::LogWatch::current().text(),
                  HasSubstr("gradients of no_sync() that no backward has averaged"));
    }
  });
}

TEST(Join, MirrorsSparseGradientsAndBuffers) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : table(register_module(
                "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true)))),
            buffer(register_buffer("buffer", torch::zeros({1}))) {}
      torch::Tensor forward(torch::Tensor x) {
        buffer += 1;
        return table(x);
      }
      torch::nn::Embedding table;
      torch::Tensor buffer;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group);
    join(ddp, [&] {
      for (int step = 0; step < (group.rank() == 0 ? 1 : 4); ++step) {
        net->zero_grad();
        ddp(torch::tensor({1, group.rank()})).sum().backward();
      }
    });
    EXPECT_EQ(net->buffer.item<float>(), 4.0f);  // copied from rank 1
  });
}

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : linear(register_module("linear", torch::nn::Linear(3, 3))),
        norm(register_module("norm", torch::nn::BatchNorm1d(3))) {
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) { return norm(linear(x)); }
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;
};

// A finished rank may validate while the others train, and the other way round.
TEST(Join, FinishedRanksModeDoesNotMatter) {
  for (const bool others_train : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<NormedImpl>();
      auto fixed = std::make_shared<NormedImpl>();
      DistributedDataParallel<NormedImpl> ddp(net, group);
      DistributedDataParallel<NormedImpl> second(fixed, group);
      net->train(others_train);
      fixed->train(!others_train);
      join({&ddp, &second}, [&] {
        for (int step = 0; step < (group.rank() == 0 ? 1 : 4); ++step) {
          net->zero_grad();
          fixed->zero_grad();
          const auto x = random({4, 3}, static_cast<std::uint64_t>(step));
          ddp(x).pow(3).sum().backward();
          second(x).pow(3).sum().backward();
        }
        if (group.rank() == 0) {
          net->train(!others_train);
          fixed->train(others_train);
        }
      });
      for (const auto& part : {net, fixed}) {
        EXPECT_EQ(part->norm->num_batches_tracked.item<std::int64_t>(),
                  (part == net) == others_train ? 4 : 0);
        std::vector<torch::Tensor> all{torch::zeros({3}, torch::kDouble),
                                       torch::zeros({3}, torch::kDouble)};
        group.all_gather(all, part->norm->running_mean).wait();
        EXPECT_TRUE(torch::equal(all[0], all[1]));
      }
    });
  }
}

TEST(Join, StaticGraphMirrorMayTrainLater) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group, {.static_graph = true});
    for (int epoch = 0; epoch < 2; ++epoch) {
      join(ddp, [&] {
        for (int step = 0; step < (epoch == 0 && group.rank() == 1 ? 0 : 2); ++step) {
          net->zero_grad();
          ddp(2.0).sum().backward();
          EXPECT_EQ(net->weight.grad().item<double>(), epoch == 0 ? 1.0 : 2.0) << epoch;
        }
      });
    }
  });
}

TEST(Join, LateStaticGraphUseIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(net, group, {.static_graph = true});
    join(ddp, [&] {
      if (group.rank() == 0) ddp(std::vector<bool>{true, true, false}, 1.0).sum().backward();
    });
    if (group.rank() == 0) {  // the refused rank does not wait for this one
      group.store()->wait({"refused"}, harness::kLimit);
      return;
    }
    const Error error = harness::error_of([&] {
      ddp(std::vector<bool>{false, true, true}, 1.0).sum().backward();
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(
        error.text(),
        HasSubstr("a gradient for parameter 2 (w2) on rank 1, which the first pass of the others"));
    EXPECT_THAT(harness::error_of([&] {
                  ddp(std::vector<bool>{true, true, false}, 1.0);
                }).text(),
                HasSubstr("the last backward failed on rank 1"));
    group.store()->set("refused", std::string("yes"));
  });
}

TEST(Join, ThrowsOnAllRanksAfterCommonSteps) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    int done = 0;
    try {
      join(
          ddp,
          [&] {
            for (int step = 0; step < (group.rank() == 1 ? 2 : 5); ++step) {
              ddp(1.0).sum().backward();
              ++done;
            }
          },
          JoinOptions{.throw_on_early_termination = true});
      ADD_FAILURE() << "no error on rank " << group.rank();
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Cancelled);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("ran out of inputs"));
    }
    EXPECT_EQ(done, 2);
  });
}

TEST(Join, DisabledJoinOnlyRunsTheSteps) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    join(
        ddp, [&] { ddp(group.rank() + 1.0).sum().backward(); }, JoinOptions{.enable = false});
    EXPECT_EQ(net->weight.grad().item<double>(), 1.5);
  });
}

TEST(Join, UsersExceptionPassesThrough) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    EXPECT_THROW(join(ddp, [] { throw std::out_of_range("mine"); }), std::out_of_range);
    join({&ddp}, [&] { ddp(1.0).sum().backward(); });  // usable again
  });
}

TEST(Join, NestedUseOfOneObjectIsRefused) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    const Error error = harness::error_of([&] { join(ddp, [&] { join(ddp, [] {}); }); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("inside another join already"));
  });
}

TEST(Join, MixedGroupsOrDuplicatesAreRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const auto refused = [](std::vector<Joinable*> joinables) -> std::string {
      try {
        join(std::move(joinables), [] {});
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::Caller);
        return error.what();
      }
      return "not refused";
    };
    ProcessGroup same = group.new_group({0, 1});
    ProcessGroup reversed = group.new_group({1, 0});
    Mlp net, of_same, of_reversed;
    DistributedDataParallel ddp(net, group);
    DistributedDataParallel same_ddp(of_same, same);
    DistributedDataParallel reversed_ddp(of_reversed, reversed);
    EXPECT_THAT(refused({&ddp, &reversed_ddp}),
                HasSubstr("groups of the same ranks in the same order"));
    EXPECT_THAT(refused({&ddp, &same_ddp, &ddp}), HasSubstr("given twice"));
    join({&ddp, &same_ddp}, [&] {
      if (group.rank() == 0)
        (ddp(torch::ones({1, 6}, torch::kDouble)) + same_ddp(torch::ones({1, 6}, torch::kDouble)))
            .sum()
            .backward();
    });
  });
}

TEST(Join, DifferingCallsAreRefusedOnAll) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup group) {
    const bool other = group.rank() == 1;
    auto net = std::make_shared<ScalarImpl>();
    auto more = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    DistributedDataParallel<ScalarImpl> second(more, group);
    const auto text_of = [&](std::vector<Joinable*> joinables, JoinOptions options) {
      const Error error = harness::error_of([&] {
        join(
            std::move(joinables), [] {}, options);
      });
      EXPECT_EQ(error.blame(), Blame::Caller);
      return error.text();
    };
    EXPECT_THAT(
        text_of(other ? std::vector<Joinable*>{&ddp} : std::vector<Joinable*>{&ddp, &second}, {}),
        HasSubstr("different numbers of objects"));
    EXPECT_THAT(text_of({&ddp}, {.divide_by_initial_world_size = other}),
                HasSubstr("different values of divide_by_initial_world_size"));
    EXPECT_THAT(text_of({&ddp}, {.throw_on_early_termination = other}),
                HasSubstr("different values of throw_on_early_termination"));
    join(ddp, [&] { ddp(1.0).sum().backward(); });  // still usable
  });
}

TEST(Join, NullPointerIsRefused) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    auto net = std::make_shared<ScalarImpl>();
    DistributedDataParallel<ScalarImpl> ddp(net, group);
    EXPECT_EQ(harness::error_of([&] { join({&ddp, nullptr}, [] {}); }).blame(), Blame::Caller);
    EXPECT_EQ(harness::error_of([&] { join({nullptr}, [] {}, {.enable = false}); }).blame(),
              Blame::Caller);
  });
}

}  // namespace
}  // namespace weft::testing
