// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <weft/autograd.h>
#include <weft/fully_shard.h>
#include <weft/tests/engine/autograd/trainers.h>
#include <weft/tests/harness/ranks.h>

namespace {

using namespace weft;
namespace nn = torch::nn;

TEST(ShardedInContexts, ForwardAndBackwardAreRefused) {
  const harness::Setting place = {harness::As::Threads, "shm"};
  hybrid::train(place, 2, 2, [](rpc::Agent& agent, ProcessGroup& group) {
    nn::Sequential net(nn::Linear(4, 4), nn::Linear(4, 4));
    FullyShardedDataParallel sharded(net, group);
    const auto loss = sharded(torch::ones({2, 4})).sum();
    AutogradContext context(agent);
    const std::function<void()> calls[] = {[&] {
                                             sharded(torch::ones({2, 4}));
                                           },
                                           [&] { context.backward({loss}); }};
    for (const auto& call : calls) {
      const Error error = harness::error_of(call);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("which an AutogradContext does not use"));
    }
  });
}

TEST(CheckpointedInContexts, GradientsAreThoseOfAPlainCall) {
  const harness::Setting place = {harness::As::Threads, "shm"};
  hybrid::train(place, 2, 2, [](rpc::Agent& agent, ProcessGroup&) {
    nn::Sequential net(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4));
    const auto gradients = [&](bool checkpoints) {
      AutogradContext context(agent);
      const auto x = torch::ones({2, 4});
      const auto y = checkpoints ? checkpointed(net, x) : net->forward(x);
      context.backward({y.square().sum()});
      std::vector<torch::Tensor> all;
      for (const auto& parameter : net->parameters()) all.push_back(context.gradient(parameter));
      return all;
    };
    const auto usual = gradients(false);
    const auto mine = gradients(true);
    for (std::size_t i = 0; i < usual.size(); ++i) EXPECT_TRUE(torch::equal(usual[i], mine[i]));
  });
}

}  // namespace
