// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <torch/optim/adamw.h>

#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

MakeOptimizer sgd() {
  return [](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  };
}
MakeOptimizer adamw() {
  return [](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(0.01));
  };
}

// Trains a copy of the model by `Wrapper` and returns the parameters.
template <class Wrapper, class Model>
void train(Wrapper& wrapped, Model& model, const MakeOptimizer& make, int rank, int steps = 3) {
  auto optimizer = make(model->parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    const auto inputs = numbers({4, 8}, static_cast<std::uint64_t>(100 * step + rank));
    wrapped(inputs).square().mean().backward();
    optimizer->step();
  }
}

template <class Make>
void expect_bits_of_ddp(ProcessGroup& group, const Make& make, const MakeOptimizer& optimizer,
                        const FullyShardOptions& options = {}, int steps = 3) {
  auto reference = make();
  fill_values(*reference);
  DistributedDataParallel ddp(reference, group);
  train(ddp, reference, optimizer, group.rank(), steps);
  auto model = make();
  fill_values(*model, group.rank() == 0 ? 1 : 2);  // rank 0's values count
  FullyShardedDataParallel sharded(model, group, options);
  train(sharded, model, optimizer, group.rank(), steps);
  EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
}

TEST(FullyShard, TrainsAsDdpBitForBit) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    expect_bits_of_ddp(
        group, [] { return blocks(3); }, sgd());
    expect_bits_of_ddp(
        group, [] { return blocks(3); }, adamw());
  });
}

}  // namespace
}  // namespace weft::testing
