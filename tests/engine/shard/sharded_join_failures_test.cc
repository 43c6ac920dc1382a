// SPDX-License-Identifier: Apache-2.0
// weft::join of sharded models: what ends it, and what it refuses.
#include <csignal>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>

#include <weft/checkpoint.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

#include "joined_models.h"

namespace weft::testing::joined {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

TEST(ShardedJoinFailures, OfOneRankAreToldToAll) {
  for (const int failing : {0, 2}) {
    run_ranks(As::Threads, 3, [&](ProcessGroup& group) {
      auto model = blocks(2);
      FullyShardedDataParallel sharded(model, group);
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      const auto run = [&] {
        join(sharded, optimizer, [&] {
          for (int step = 0; step < (group.rank() == 1 ? 1 : 5); ++step) {
            if (group.rank() == failing && step == 2) throw std::out_of_range("no such batch");
            optimizer.zero_grad();
            sharded(inputs(step, group.rank())).square().mean().backward();
            optimizer.step();
          }
        });
      };
      if (group.rank() == failing) {
        EXPECT_THROW(run(), std::out_of_range);
        return;
      }
      const Error error = error_of(run);
      EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
      EXPECT_THAT(error.text(), HasSubstr("an exception ended the steps of rank " +
                                          std::to_string(failing) + ": no such batch"));
    });
  }
}

TEST(ShardedJoinFailures, ADeadRankIsNamedToThoseThatHaveRunOut) {
  harness::Processes processes(3, [](int rank) {
    ProcessGroup group = init_process_group({.backend = "weft"});
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    const Error error = error_of([&] {
      join(sharded, optimizer, [&] {
        for (int step = 0; step < (rank == 0 ? 1 : 5); ++step) {
          const auto loss = sharded(inputs(step, rank)).square().mean();
          if (rank == 1 && step == 2) ::raise(SIGKILL);
          loss.backward();
        }
      });
    });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
  });
  processes.expect_success({1});
}

TEST(ShardedJoinFailures, GradientsThatNoSyncKeepsAreRefusedBeforeIt) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    {
      const auto quiet = sharded.no_sync();
      sharded(inputs(0, group.rank())).square().mean().backward();
    }
    const Error error = error_of([&] { join(sharded, optimizer, [] {}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("keeps gradients of an earlier no_sync()"));
    optimizer.zero_grad();
    join(sharded, optimizer, [] {});
  });
}

TEST(ShardedJoinFailures, WhatNoSyncKeepsAtItsEndIsDroppedOnAllRanks) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    join(sharded, optimizer, [&] { train(sharded, *model, optimizer, group.rank(), 3, 4); });
    join(sharded, optimizer,
         [&] { train(sharded, *model, optimizer, group.rank(), group.rank() == 0 ? 3 : 2, 2); });
    join(sharded, optimizer, [] {});  // nothing is kept
  });
}

TEST(ShardedJoinFailures, AFailedBackwardEndsTheSteps) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    const Error error = error_of([&] {
      join(sharded, optimizer, [&] {
        if (group.rank() == 1) return;
        torch::Tensor x = inputs(0, 0).requires_grad_();
        x.register_hook([](const torch::Tensor&) -> torch::Tensor {
          throw std::runtime_error("a hook that fails");
        });
        const auto loss = sharded(x).square().mean();
        EXPECT_THROW(loss.backward(), std::runtime_error);
        sharded(inputs(1, 0));
      });
    });
    EXPECT_EQ(error.blame(), group.rank() == 0 ? Blame::Caller : Blame::Cancelled) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("a backward of this rank has failed"));
  });
}

TEST(ShardedJoinFailures, HooksOfShardsAreCalledOnRanksThatHaveRunOut) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    int calls = 0;
    model->parameters()[0].register_hook([&](const torch::Tensor& gradient) {
      ++calls;
      return gradient;
    });
    join(sharded, optimizer,
         [&] { train(sharded, *model, optimizer, group.rank(), group.rank() == 0 ? 2 : 0); });
    EXPECT_EQ(calls, 2);
  });
}

TEST(ShardedJoinFailures, ThrowOnEarlyTerminationLeavesTheGroupUsable) {
  run_ranks(As::Threads, 3, [](ProcessGroup& group) {
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    const Error error = error_of([&] {
      join(sharded, optimizer,
           [&] { train(sharded, *model, optimizer, group.rank(), group.rank() == 1 ? 2 : 4); },
           {.throw_on_early_termination = true});
    });
    EXPECT_THAT(error.text(), HasSubstr("ran out of inputs"));
    train(sharded, *model, optimizer, group.rank(), 1);
  });
}

TEST(ShardedJoinRefusals, NameTheRemedy) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = blocks(1), other = blocks(1);
    AdamW before(model->parameters(), AdamWOptions(0.01));
    FullyShardedDataParallel sharded(model, group);
    DistributedDataParallel ddp(other, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::LBFGS lbfgs(model->parameters());
    const auto refused = [&](torch::optim::Optimizer& given, const std::function<void()>& steps,
                             const std::string& text) {
      const Error error = error_of([&] { join(sharded, given, steps); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_THAT(error.text(), HasSubstr(text));
    };
    refused(
        before, [] { FAIL(); }, "a parameter that is no shard of this model");
    refused(
        lbfgs, [] { FAIL(); }, "is LBFGS");
    refused(
        group.rank() == 0 ? static_cast<torch::optim::Optimizer&>(sgd) : optimizer, [] { FAIL(); },
        "the ranks give different optimizers");
    EXPECT_THAT(error_of([&] {
                  join({&ddp, &sharded}, [] { FAIL(); });
                }).text(),
                HasSubstr("join it alone, with its optimizers"));
    EXPECT_THAT(error_of([&] { join(sharded, {nullptr}, [] { FAIL(); }); }).text(),
                HasSubstr("null pointer"));
    join(sharded, {&optimizer}, [&] { train(sharded, *model, optimizer, group.rank(), 1); });
  });
}

TEST(ShardedJoinRefusals, OfWhatOnlySomeRanksWouldCall) {
  const auto refused = [](const auto& call, const std::string& text) {
    run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
      auto model = blocks(1);
      FullyShardedDataParallel sharded(model, group);
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      GradScaler scaler;
      const Error error = error_of([&] {
        join(sharded, optimizer, [&] {
          sharded(inputs(0, 0)).sum().backward();
          call(model, optimizer, scaler);
        });
      });
      EXPECT_THAT(error.text(), HasSubstr(text));
    });
  };
  refused([](auto& model, auto&, auto&) { const FullParameters full(*model); },
          "FullParameters inside of weft::join");
  refused(
      [](auto&, auto& optimizer, auto& scaler) {
        scaler.scale(torch::ones({}));
        scaler.step(optimizer);
      },
      "leave out the GradScaler");
  refused([](auto& model, auto&, auto&) { clip_grad_norm_(*model->ptr(0), 1); },
          "can clip the whole model only");
}

// The optimizer has one more parameter inside of a join, which a file would keep.
TEST(ShardedJoinRefusals, OfCheckpointsOfTheOptimizer) {
  const harness::Folder folder;
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto model = blocks(1);
    FullyShardedDataParallel sharded(model, group);
    AdamW optimizer(model->parameters(), AdamWOptions(0.01));
    const std::vector<checkpoint::Part> parts = {{"optimizer", optimizer}};
    const std::string file = folder.path() + "/file", run = folder.path() + "/run";
    const auto refused = [](const auto& call) {
      const Error error = error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("save and load it before or after the join"));
    };
    train(sharded, *model, optimizer, group.rank(), 1);
    checkpoint::save(file, group, parts);
    checkpoint::save_async(run, group, parts).wait();
    join(sharded, optimizer, [&] {
      refused([&] { checkpoint::save(file, group, parts); });
      refused([&] { checkpoint::save_async(run, group, parts).wait(); });
      refused([&] { checkpoint::load(file, group, parts); });
      refused([&] { checkpoint::load(run, group, parts); });
    });
    checkpoint::load(file, group, parts);
    checkpoint::load(run, group, parts);
  });
}

}  // namespace
}  // namespace weft::testing::joined
