// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/embedding.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

TEST(CommHooks, BuiltInHooksEqualTheAverage) {
  struct Case {
    const char* name;
    std::function<CommHook(ProcessGroup)> make;
    double tolerance;
  };
  const std::vector<Case> cases{
      {"all_reduce", [](ProcessGroup group) { return comm_hooks::all_reduce(group); }, 1e-12},
      {"fp16", [](ProcessGroup group) { return comm_hooks::fp16_compress(group); }, 2e-3},
      {"bf16", [](ProcessGroup group) { return comm_hooks::bf16_compress(group); }, 1.6e-2},
      {"fp16 around all_reduce",
       [](ProcessGroup group) { return comm_hooks::fp16_compress(comm_hooks::all_reduce(group)); },
       2e-3}};
  for (const Case& item : cases) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      Mlp net;
      fill(net);
      Mlp plain;
      fill(plain);
      DistributedDataParallel ddp(net, group, {.bucket_bytes = 100, .first_bucket_bytes = 1});
      ddp.register_comm_hook(item.make(group));
      for (int step = 0; step < 100; ++step) {
        net->zero_grad();
        plain->zero_grad();
        const auto batch = random({4, 6}, static_cast<std::uint64_t>(step));
        ddp(part(batch, group.rank(), 2)).sum().backward();
        (plain(batch).sum() / 2).backward();
        ASSERT_LT(difference(gradients(*net), gradients(*plain)), item.tolerance)
            << item.name << " step " << step;
        ASSERT_EQ(net->first->weight.grad().scalar_type(), torch::kDouble);
      }
    });
  }
}

TEST(CommHooks, ContinuationMayScaleTheResult) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    Mlp plain;
    fill(plain);
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook([reduce = comm_hooks::all_reduce(group)](GradBucket& bucket) {
      return reduce(bucket).then([](const at::Tensor& average) { return average * 10; });
    });
    const auto batch = random({4, 6}, 5);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      plain->zero_grad();
      ddp(part(batch, group.rank(), 2)).sum().backward();
      (plain(batch).sum() / 2).backward();
      std::vector<torch::Tensor> expected;
      for (const auto& gradient : gradients(*plain)) expected.push_back(gradient * 10);
      EXPECT_LT(difference(gradients(*net), expected), 1e-12);
    }
  });
}

TEST(CommHooks, SeesTheBucketAndItsParameters) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group);
    std::size_t seen = 0;
    ddp.register_comm_hook([&](GradBucket& bucket) {
      std::int64_t elements = 0;
      for (std::size_t i = 0; i < bucket.parameters().size(); ++i) {
        EXPECT_EQ(bucket.gradients()[i].sizes(), bucket.parameters()[i].sizes());
        elements += bucket.parameters()[i].numel();
        ++seen;
      }
      EXPECT_EQ(bucket.buffer().numel(), elements);
      return Future<at::Tensor>::ready(
          bucket.buffer());  // without communication the local gradients stay
    });
    const auto mine = random({2, 6}, static_cast<std::uint64_t>(group.rank()));
    ddp(mine).sum().backward();
    Mlp plain;
    fill(plain);
    plain(mine).sum().backward();
    EXPECT_EQ(difference(gradients(*net), gradients(*plain)), 0.0);
    EXPECT_EQ(seen, net->parameters().size());
  });
}

TEST(CommHooks, MisuseIsACallerError) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group);
    EXPECT_THROW(ddp.register_comm_hook({}), Error);
    ddp.register_comm_hook([](GradBucket&) { return Future<at::Tensor>::ready(torch::ones({1})); });
    EXPECT_THROW(ddp.register_comm_hook(comm_hooks::all_reduce(group)), Error);
    try {
      ddp(random({2, 6}, 1)).sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("a comm hook returned 1 elements"));
    }
  });
}

TEST(CommHooks, MayAskForStatisticsAndNothingElse) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group);
    std::vector<std::size_t> passes;
    std::string refused;
    ddp.register_comm_hook([&, reduce = comm_hooks::all_reduce(group)](GradBucket& bucket) {
      passes.push_back(ddp.stats().passes);
      refused = harness::error_of([&] { static_cast<void>(ddp.no_sync()); }).text();
      return reduce(bucket).then([&](const at::Tensor& average) {
        static_cast<void>(ddp.stats());
        return average;
      });
    });
    for (int step = 0; step < 2; ++step) ddp(random({2, 6}, 1)).sum().backward();
    EXPECT_EQ(passes, (std::vector<std::size_t>{0, 1}));
    EXPECT_THAT(refused, ::testing::HasSubstr("no_sync: a communication hook calls it"));
  });
}

TEST(CommHooks, WrongSparseResultIsACallerError) {
  for (const torch::Tensor& result : {torch::Tensor(), torch::ones({1}), torch::ones({2, 5})}) {
    harness::run_ranks(harness::As::Threads, 1, [&](ProcessGroup group) {
      torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
      DistributedDataParallel ddp(net, group);
      ddp.register_comm_hook([&](GradBucket&) { return Future<at::Tensor>::ready(result); });
      const auto error = harness::error_of([&] { ddp(torch::tensor({1})).sum().backward(); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("a comm hook returned"));
    });
  }
}

TEST(CommHooks, SparseResultNeedsASparseBucket) {
  harness::run_ranks(harness::As::Threads, 1, [&](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook(
        [](GradBucket& bucket) { return Future<at::Tensor>::ready(bucket.buffer().to_sparse()); });
    const auto error = harness::error_of([&] { ddp(random({2, 6}, 1)).sum().backward(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(),
                ::testing::HasSubstr("a comm hook returned a tensor of layout Sparse"));
  });
}

TEST(CommHooks, CompressionKeepsTheImaginaryPart) {
  struct Net : torch::nn::Module {
    torch::Tensor forward() {
      return (torch::view_as_real(weight) * torch::tensor({1.0, 3.0})).sum();
    }
    torch::Tensor weight = register_parameter("weight", torch::ones({2}, torch::kComplexFloat));
  };
  for (const bool half : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      const auto net = std::make_shared<Net>();
      DistributedDataParallel<Net> ddp(net, group);
      ddp.register_comm_hook(half ? comm_hooks::fp16_compress(group)
                                  : comm_hooks::bf16_compress(group));
      ddp().backward();
      EXPECT_TRUE(torch::equal(torch::view_as_real(net->weight.grad()),
                               torch::tensor({{1.0F, 3.0F}, {1.0F, 3.0F}})));
    });
  }
}

// Otherwise a single element would be repeated for all.
TEST(CommHooks, CompressionChecksTheResultsShape) {
  for (const torch::Tensor& result : {torch::Tensor(), torch::ones({1}), torch::ones({})}) {
    harness::run_ranks(harness::As::Threads, 1, [&](ProcessGroup group) {
      Mlp net;
      DistributedDataParallel ddp(net, group);
      ddp.register_comm_hook(comm_hooks::fp16_compress(
          [&](GradBucket&) { return Future<at::Tensor>::ready(result); }));
      const auto error = harness::error_of([&] { ddp(random({2, 6}, 1)).sum().backward(); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("for a compressed bucket of"));
    });
  }
}

// The result has gaps in memory of its own, or is a view of the bucket in another order.
TEST(CommHooks, ResultMayHaveGapsOrAliasTheBucket) {
  for (const bool shares : {true, false}) {
    harness::run_ranks(harness::As::Threads, 1, [&](ProcessGroup group) {
      torch::nn::Linear net(torch::nn::LinearOptions(3, 2).bias(false));
      DistributedDataParallel ddp(net, group);
      ddp.register_comm_hook([&](GradBucket& bucket) {
        const auto square = bucket.buffer().view({2, 3});
        square.copy_(torch::arange(6).view({2, 3}));
        return Future<at::Tensor>::ready(
            shares ? square.t() : torch::stack({square, square}, 1).narrow(1, 0, 1));
      });
      ddp(torch::ones({1, 3})).sum().backward();
      const auto expected = shares ? torch::arange(6).view({2, 3}).t().reshape({2, 3})
                                   : torch::arange(6).view({2, 3});
      EXPECT_TRUE(torch::equal(net->weight.grad(), expected.to(torch::kFloat)))
          << net->weight.grad();
    });
  }
}

TEST(CommHooks, CompressionTakesSparseGradients) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook(comm_hooks::bf16_compress(group));
    ddp(torch::tensor({1, 2 + group.rank()})).sum().backward();
    const auto expected = torch::tensor({0.0F, 1.0F, 0.5F, 0.5F, 0.0F}).view({5, 1}).expand({5, 2});
    EXPECT_EQ(net->weight.grad().scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(net->weight.grad().to_dense(), expected));
  });
}

TEST(CommHooks, NextForwardReportsAFailedHook) {
  const std::vector<std::pair<CommHook, std::string>> hooks{
      {[](GradBucket&) {
         return Future<at::Tensor>::failed(std::make_exception_ptr(Error(Blame::Busy, "no room")));
       },
       "no room"},
      {[](GradBucket&) { return Future<at::Tensor>(); }, "default-constructed"},
      {[](GradBucket&) -> Future<at::Tensor> { throw std::runtime_error("thrown"); }, "thrown"}};
  for (const auto& [hook, why] : hooks) {
    harness::run_ranks(harness::As::Threads, 1, [&](ProcessGroup group) {
      Mlp net;
      DistributedDataParallel ddp(net, group);
      ddp.register_comm_hook(hook);
      EXPECT_ANY_THROW(ddp(random({2, 6}, 1)).sum().backward());
      const auto error = harness::error_of([&] { ddp(random({2, 6}, 1)); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("the last backward failed on rank 0"));
      EXPECT_THAT(error.text(), ::testing::HasSubstr(why));
      net->zero_grad();
      DistributedDataParallel again(net, group);  // while the other wrapper exists
      again(random({2, 6}, 1)).sum().backward();
      EXPECT_EQ(again.stats().passes, 1U);
    });
  }
}

TEST(CommHooks, HookAfterABackwardIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group);
    ddp(random({2, 6}, 1)).sum().backward();
    const auto error =
        harness::error_of([&] { ddp.register_comm_hook(comm_hooks::all_reduce(group)); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), ::testing::HasSubstr("before the first backward"));
  });
}

TEST(CommHooks, FailedHookEndsTheBackward) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook([](GradBucket&) -> Future<at::Tensor> {
      return Future<at::Tensor>::failed(std::make_exception_ptr(Error(Blame::Busy, "no room")));
    });
    try {
      ddp(random({2, 6}, 1)).sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Busy);
    }
  });
}

}  // namespace
}  // namespace weft::testing
