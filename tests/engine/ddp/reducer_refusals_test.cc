// SPDX-License-Identifier: Apache-2.0
// Refusals of the reducer, and the consequences of a backward that fails.
#include <latch>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

Blame blame_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.blame();
  }
  ADD_FAILURE() << "no error";
  return Blame::Remote;
}

TEST(Unused, NextForwardNamesUnusedParameters) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(net, group);
    ddp(std::vector<bool>{true, false, true}, 1.0).sum().backward();
    try {
      ddp(std::vector<bool>{true, true, true}, 1.0);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(),
                  HasSubstr("parameter 1 (w1) on rank " + std::to_string(group.rank())));
      EXPECT_THAT(error.what(), HasSubstr("find_unused_parameters"));
    }
  });
}

TEST(StaticGraph, BrokenPromiseNamesTheParameter) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(net, group, {.static_graph = true});
    ddp(std::vector<bool>{true, true, false}, 1.0).sum().backward();
    try {
      ddp(std::vector<bool>{true, true, true}, 1.0).sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), HasSubstr("w2"));
    }
  });
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(net, group, {.static_graph = true});
    ddp(std::vector<bool>{true, true, true}, 1.0).sum().backward();
    ddp(std::vector<bool>{true, false, true}, 1.0).sum().backward();
    EXPECT_EQ(blame_of([&] { ddp(std::vector<bool>{true, true, true}, 1.0); }), Blame::Caller);
  });
}

TEST(Failures, AbortFreesAWaitingBackward) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group);
    harness::meet(group);
    if (group.rank() == 1) {  // never runs its backward
      group.store()->wait({"begun"}, harness::kLimit);
      group.abort("enough");
      return;
    }
    const auto loss = ddp(random({4, 6}, 3)).pow(2).sum();
    net->third->bias.register_hook(
        [&](const torch::Tensor&) { group.store()->set("begun", std::string("yes")); });
    EXPECT_EQ(blame_of([&] { loss.backward(); }), Blame::Cancelled);
  });
}

TEST(Failures, NextForwardReportsABrokenGroup) {
  std::latch begun(2);
  std::latch tried(2);  // a rank that leaves earlier is lost to the other
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    auto net = std::make_shared<ChainImpl>(2);
    DistributedDataParallel<ChainImpl> ddp(net, group);
    const auto output = ddp(torch::ones({1}, torch::kDouble));
    begun.arrive_and_wait();
    group.abort("enough");
    EXPECT_EQ(blame_of([&] { output.sum().backward(); }), Blame::Cancelled);
    EXPECT_EQ(blame_of([&] { ddp(torch::ones({1}, torch::kDouble)); }), Blame::Cancelled);
    tried.arrive_and_wait();
  });
}

TEST(Failures, FailedBackwardAllowsANewWrapper) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    {
      DistributedDataParallel ddp(net, group);
      auto y = ddp(random({2, 6}, 1));
      y.register_hook(
          [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("a user's hook"); });
      EXPECT_THROW(y.sum().backward(), std::runtime_error);
      const auto error = harness::error_of([&] { ddp(random({2, 6}, 1)); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("the last backward failed"));
    }
    net->zero_grad();
    DistributedDataParallel again(net, group);
    again(random({2, 6}, static_cast<std::uint64_t>(group.rank()))).sum().backward();
    EXPECT_EQ(again.stats().passes, 1u);
  });
}

TEST(Failures, NewWrapperReplacesABrokenOne) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    auto pair = group.new_group({0, 1});
    DistributedDataParallel old(net, pair, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    harness::meet(group);  // both ranks have made it
    bool breaks = true;
    net->second->weight.register_hook([&](const torch::Tensor&) {
      if (std::exchange(breaks, false))
        pair.abort("enough");  // some buckets have been sent, the next one cannot be
    });
    EXPECT_EQ(blame_of([&] { old(random({2, 6}, 1)).sum().backward(); }), Blame::Cancelled);
    harness::meet(group);
    net->zero_grad();
    DistributedDataParallel again(net, group);
    again(random({2, 6}, 2)).sum().backward();
    EXPECT_EQ(again.stats().passes, 1u);
    EXPECT_EQ(blame_of([&] { old(random({2, 6}, 1)); }), Blame::Cancelled);
  });
}

}  // namespace
}  // namespace weft::testing
