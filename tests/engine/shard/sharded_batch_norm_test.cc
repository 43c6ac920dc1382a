// SPDX-License-Identifier: Apache-2.0
// Layers that convert_sync_batch_norm has marked, in sharded models.
#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>

#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

// Two batch norms: with running statistics, whose tensors carry the group, and without, where the
// weight does, which is sharded.
nn::Sequential normalised() {
  return nn::Sequential(nn::Linear(8, 6), nn::BatchNorm1d(6),
                        nn::BatchNorm1d(nn::BatchNorm1dOptions(6).track_running_stats(false)));
}

// What the synchronised layers give for the batches of all ranks.
template <class Wrapped>
std::vector<torch::Tensor> trained(Wrapped& wrapped, nn::Module& model, int rank) {
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<torch::Tensor> results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto input = numbers({4, 8}, static_cast<std::uint64_t>(10 * step + rank));
    results.push_back(wrapped(input * (1 + rank) + rank));
    (results.back() * numbers({4, 6}, static_cast<std::uint64_t>(rank))).sum().backward();
    optimizer.step();
  }
  for (auto& result : results) result = result.detach();
  for (const auto& buffer : model.buffers()) results.push_back(buffer.clone());
  model.eval();
  results.push_back(wrapped(numbers({4, 8}, 50)).detach());
  return results;
}

class ShardedBatchNorm : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, ShardedBatchNorm, ::testing::Bool(), [](const auto& info) {
  return info.param ? "MarkedBeforeSharding" : "MarkedAfterSharding";
});

TEST_P(ShardedBatchNorm, IsSynchronisedAsInDdp) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto reference = normalised();
    fill_values(*reference);
    EXPECT_EQ(convert_sync_batch_norm(*reference, group), 2);
    DistributedDataParallel ddp(reference, group);
    const auto expected = trained(ddp, *reference, group.rank());

    auto net = normalised();
    fill_values(*net);
    if (GetParam()) convert_sync_batch_norm(*net, group);
    FullyShardedDataParallel sharded(net, group);
    if (!GetParam()) convert_sync_batch_norm(*net, group);
    EXPECT_TRUE(are_equal(trained(sharded, *net, group.rank()), expected));
    EXPECT_TRUE(are_equal(whole(*net), copies(reference->parameters())));
  });
}

}  // namespace
}  // namespace weft::testing
