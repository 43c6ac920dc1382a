// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel refuses models and options that differ between ranks, and models that it
// could not average.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

TEST(Ddp, ModelShapesMustAgree) {
  for (const auto as : {harness::As::Threads, harness::As::Processes}) {
    harness::run_ranks(as, 3, [](ProcessGroup group) {
      Mlp net(6, group.rank() == 2 ? 4 : 5);
      try {
        DistributedDataParallel ddp(net, group);
        ADD_FAILURE() << "no error on rank " << group.rank();
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::Caller);
        EXPECT_THAT(error.what(), HasSubstr("rank 2: it has first.weight Double [4, 6]"));
      }
    });
  }
}

TEST(Ddp, ParameterCountsMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2));
    if (group.rank() == 1) net->push_back(torch::nn::Linear(2, 2));
    EXPECT_THROW(DistributedDataParallel<torch::nn::SequentialImpl>(net, group), Error);
  });
}

// The error of a collective that the program has not called itself names its caller in Weft.
TEST(Ddp, BufferCollectiveErrorNamesDdp) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
    DistributedDataParallel<torch::nn::SequentialImpl> ddp(net, group);
    const Error error = harness::error_of([&] {
      if (group.rank() == 0) group.all_reduce(torch::ones({1})).wait();
      ddp(torch::ones({4, 2}));
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    const std::string whose =
        group.rank() == 1 ? "DistributedDataParallel's buffers: broadcast #" : "all_reduce #";
    EXPECT_THAT(error.text(), ::testing::StartsWith(whose));
  });
}

TEST(Ddp, ComparingModelsLeavesNoStoreKeys) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  harness::run_threads(2, [&](int rank) {
    auto group = init_process_group(
        {.rank = rank, .world_size = 2, .store = store, .device = c10::Device(c10::kCPU)});
    Mlp net;
    group.barrier().wait();
    const auto before = store->getNumKeys();
    group.barrier().wait();
    const DistributedDataParallel ddp(net, group);
    EXPECT_EQ(store->getNumKeys(), before);
    group.barrier().wait();
  });
}

TEST(Ddp, MemoryOrdersMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Conv2d net(3, 4, 3);
    if (group.rank() == 1)
      net->weight.set_data(net->weight.contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_THROW(DistributedDataParallel(net, group), Error);
  });
}

TEST(Ddp, ModuleWithoutGradientsIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(2, 2);
    for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
    EXPECT_THROW(DistributedDataParallel(net, group), Error);
  });
}

TEST(Ddp, EmptyModuleIsRefused) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    const auto refused = [&](const auto& module) {
      EXPECT_THAT([&] { DistributedDataParallel ddp(module, group); },
                  ::testing::ThrowsMessage<Error>(HasSubstr("the module is empty")));
    };
    refused(torch::nn::Linear(nullptr));
    refused(std::shared_ptr<torch::nn::LinearImpl>());
  });
}

TEST(Ddp, MovedFromWrapperIsACallerError) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel source(net, group);
    DistributedDataParallel ddp = std::move(source);
    const auto expect_refused = [](const std::function<void()>& call) {
      const Error error = harness::error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("moved from"));
    };
    // NOLINTBEGIN(bugprone-use-after-move)
    expect_refused([&] { source(torch::ones({1, 2})); });
    expect_refused([&] {
      const torch::NoGradGuard no_grad;
      source(torch::ones({1, 2}));
    });
    expect_refused([&] { const auto quiet = source.no_sync(); });
    expect_refused([&] { source.register_comm_hook(comm_hooks::all_reduce(group)); });
    expect_refused([&] { static_cast<void>(source.stats()); });
    expect_refused([&] { join(source, [] {}); });
    // NOLINTEND(bugprone-use-after-move)
    ddp(torch::ones({1, 2})).sum().backward();
  });
}

// Its parameters then have other accumulators, without the hooks that see their gradients.
TEST(Ddp, ChangedDtypeNamesTheParameters) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    ddp(torch::ones({1, 2})).sum().backward();
    net->bias.requires_grad_(false).requires_grad_(true);
    net->to(torch::kFloat);  // the dtype that it already has
    ddp(torch::ones({1, 2})).sum().backward();
    net->to(torch::kDouble);
    EXPECT_THAT(
        [&] {
          ddp(torch::ones({1, 2}, torch::kDouble));
        },
        ::testing::ThrowsMessage<Error>(AllOf(HasSubstr("parameters 0 (weight), 1 (bias) on rank"),
                                              HasSubstr("then make the DistributedDataParallel"))));
    const torch::NoGradGuard no_grad;
    ddp(torch::ones({1, 2}, torch::kDouble));
  });
}

TEST(Ddp, FrozenParametersMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(2, 2);
    if (group.rank() == 1) net->weight.set_requires_grad(false);
    const auto error = harness::error_of([&] { DistributedDataParallel ddp(net, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("weight (frozen)"), std::string::npos) << error.text();
  });
}

// That rank would reduce one gradient less than the others.
TEST(Ddp, SharedWeightsMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear first(2, 2), second(2, 2);
    second->register_parameter("other", group.rank() == 1 ? first->weight : torch::ones({2, 2}));
    torch::nn::Sequential net(first, second);
    const auto error = harness::error_of([&] { DistributedDataParallel ddp(net, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("rank 1: it has 1.other (the same as 0.weight)"));
  });
}

TEST(Ddp, OptionsMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(2, 2);
    const std::size_t bytes = group.rank() == 1 ? 8 : 16;
    const auto error = harness::error_of(
        [&] { DistributedDataParallel ddp(net, group, {.bucket_bytes = bytes}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(),
                HasSubstr("rank 1: it has DdpOptions::bucket_bytes 8 where rank 0 has "
                          "DdpOptions::bucket_bytes 16"));
    DistributedDataParallel own(net, group, {.gradient_as_bucket_view = group.rank() == 1});
  });
}

TEST(Ddp, SparseBufferIsNamed) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(2, 2);
    net->register_buffer("neighbours", torch::eye(2).to_sparse());
    const auto error = harness::error_of(
        [&] { DistributedDataParallel ddp(net, group, {.broadcast_buffers = false}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("'neighbours' of the model has the layout Sparse"));
  });
}

TEST(Ddp, ExpandedParameterIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Linear net(3, 2);
    net->register_parameter("wide", torch::ones({1, 3}).expand({4, 3}));
    const auto error = harness::error_of([&] { DistributedDataParallel ddp(net, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(
        error.text(),
        HasSubstr("'wide' of the model, [4, 3] with strides [0, 1], is an expanded tensor"));
  });
}

}  // namespace
}  // namespace weft::testing
