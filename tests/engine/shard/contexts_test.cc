// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
