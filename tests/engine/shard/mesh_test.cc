// SPDX-License-Identifier: Apache-2.0
// Models that are sharded over a mesh: along its last axis, and averaged along its first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/optim/adamw.h>

#include <weft/mesh.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
namespace nn = torch::nn;

Mesh two_axes(const ProcessGroup& group, int first) {
  return {group, {{"copies", first}, {"rows", -1}}};
}

torch::Tensor loss_of(const torch::Tensor& output) { return output.square().mean(); }

template <class Wrapped>
void train(Wrapped& wrapped, const nn::Module& model, int rank, int steps = 3) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(wrapped(numbers({4, 8}, static_cast<std::uint64_t>(100 * step + rank)))).backward();
    optimizer.step();
  }
}

// The parameters that DistributedDataParallel over all ranks trains.
template <class Make>
std::vector<torch::Tensor> trained_by_ddp(ProcessGroup& group, const Make& make) {
  auto model = make();
  fill_values(*model);
  DistributedDataParallel ddp(model, group);
  train(ddp, *model, group.rank());
  return copies(model->parameters());
}

template <class Make>
std::vector<torch::Tensor> trained_over(const Mesh& mesh, const Make& make,
                                        const FullyShardOptions& options = {}) {
  auto model = make();
  const int rank = mesh.group().rank();
  fill_values(*model, rank == 0 ? 1 : 2);  // rank 0's values count
  FullyShardedDataParallel sharded(model, mesh, options);
  train(sharded, *model, rank);
  return whole(*model);
}

void expect_close(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_LE((a[i] - b[i]).norm().item<double>(), 1e-5 * b[i].norm().item<double>()) << i;
}

void expect_same_on_all(ProcessGroup& group, const std::vector<torch::Tensor>& values) {
  for (const torch::Tensor& value : values) {
    const auto first = value.clone();
    group.broadcast(first, 0).wait();
    EXPECT_TRUE(torch::equal(first, value)) << "rank " << group.rank();
  }
}

class ShardedOver2x2 : public ::testing::TestWithParam<As> {};
INSTANTIATE_TEST_SUITE_P(, ShardedOver2x2, ::testing::Values(As::Threads, As::Processes),
                         [](const auto& info) { return harness::name(info.param); });

TEST_P(ShardedOver2x2, TrainsAsDdpOverAllRanks) {
  run_ranks(GetParam(), 4, [](ProcessGroup& group) {
    const auto make = [] { return blocks(3); };
    const Mesh mesh = two_axes(group, 2);
    const auto parameters = trained_over(mesh, make);
    expect_close(parameters, trained_by_ddp(group, make));
    expect_same_on_all(group, parameters);
  });
}

TEST(ShardedOverMesh, OneRankAlongAnAxisGivesTheBitsOfDdp) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto make = [] { return blocks(3); };
    const auto expected = trained_by_ddp(group, make);
    EXPECT_TRUE(are_equal(trained_over(two_axes(group, 1), make), expected));
    EXPECT_TRUE(are_equal(trained_over(two_axes(group, 2), make), expected));
    EXPECT_TRUE(are_equal(trained_over(Mesh(group, {{"any", 2}}), make), expected));
  });
}

TEST(ShardedOverMesh, RowsAreSpreadAlongTheLastAxis) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    nn::Linear net(3, 5);
    fill_values(*net);
    const auto values = copies(net->parameters());
    const FullyShardedDataParallel sharded(net, two_axes(group, 2));
    const bool is_first = group.rank() % 2 == 0;
    EXPECT_TRUE(torch::equal(net->parameters()[0],
                             is_first ? values[0].slice(0, 0, 3) : values[0].slice(0, 3, 5)));
  });
}

TEST(ShardedOverMesh, ThreeAxesAreRefused) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"a", 1}, {"b", 2}, {"c", 2}});
    nn::Linear net(8, 8);
    for (const Error& error : {error_of([&] { FullyShardedDataParallel(net, mesh); }),
                               error_of([&] { fully_shard(net, mesh); })}) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("mesh.slice({\"b\", \"c\"})"));
    }
    const auto make = [] { return blocks(2); };
    expect_close(trained_over(mesh.slice({"b", "c"}), make), trained_by_ddp(group, make));
  });
}

}  // namespace
}  // namespace weft::testing
