// SPDX-License-Identifier: Apache-2.0
// convert_sync_batch_norm: unmodified models of libtorch's layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/folder.h>

#include "batch_norms.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using torch::nn::BatchNormOptions;

template <class Layer>
MakeLayer converted() {
  return [](const BatchNormOptions& options, ProcessGroup group) {
    Layer layer(options);
    EXPECT_EQ(convert_sync_batch_norm(*layer, group), 1);
    return BatchNormUnderTest{[layer](torch::Tensor input) mutable { return layer(input); },
                              layer.ptr()};
  };
}
void expect_converted(const BatchNormCase& item) {
  expect_as_one_process<torch::nn::BatchNorm1d>(item, converted<torch::nn::BatchNorm1d>());
}

// After the conversion the layers go to(torch::kDouble), which must not undo it.
TEST(ConvertSyncBatchNorm, EqualsOneProcess) {
  expect_converted({});
  expect_converted({.rows = {4, 2, 3}});
  expect_converted({.rows = {4, 0}});
  expect_converted({.shape = {4, 3}});
  expect_as_one_process<torch::nn::BatchNorm2d>({.shape = {4, 3, 2}},
                                                converted<torch::nn::BatchNorm2d>());
  expect_as_one_process<torch::nn::BatchNorm3d>({.shape = {4, 3, 2, 2}},
                                                converted<torch::nn::BatchNorm3d>());
}

TEST(ConvertSyncBatchNorm, FollowsTheLayersOptions) {
  expect_converted({.options = BatchNormOptions(4).momentum(std::nullopt).eps(0.1)});
  expect_converted({.options = BatchNormOptions(4).affine(false)});
  expect_converted({.options = BatchNormOptions(4).track_running_stats(false)});
}

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() { to(torch::kDouble); }
  torch::Tensor forward(torch::Tensor x) {
    return norm(convolution(x)).relu().mean({2, 3}).matmul(torch::ones({6, 1}, torch::kDouble)) +
           head->forward(x.flatten(1));
  }
  torch::nn::Conv2d convolution =
      register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 6, 3)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(6));
  torch::nn::Sequential head = register_module(
      "head", torch::nn::Sequential(torch::nn::Linear(50, 4), torch::nn::BatchNorm1d(4),
                                    torch::nn::Linear(4, 1)));
};
TORCH_MODULE(ConvNet);

void fill_net(ConvNet& net) {
  fill(net);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.mul_(0.3);
}

class ConvertedModel : public ::testing::TestWithParam<harness::As> {};
INSTANTIATE_TEST_SUITE_P(As, ConvertedModel,
                         ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

TEST_P(ConvertedModel, TrainsInDdpAsOneProcess) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    ConvNet net, plain;
    fill_net(net);
    fill_net(plain);
    EXPECT_EQ(convert_sync_batch_norm(*net, group), 2);
    DistributedDataParallel ddp(net, group, {.bucket_bytes = 300, .first_bucket_bytes = 1});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD other(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      const auto batch = random({6, 2, 5, 5}, static_cast<std::uint64_t>(step));
      const auto loss = [](const torch::Tensor& output) { return (output - 1).square().mean(); };
      optimizer.zero_grad();
      other.zero_grad();
      loss(ddp(part(batch, group.rank(), 2))).backward();
      loss(plain(batch)).backward();
      optimizer.step();
      other.step();
    }
    EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-9);
    EXPECT_TRUE(torch::allclose(net->norm->running_var, plain->norm->running_var));
  });
}

TEST(ConvertSyncBatchNorm, OtherModelsStayLocal) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::BatchNorm1d converted(2), plain(2), same(2);
    convert_sync_batch_norm(*converted, group);
    if (group.rank() == 0) {  // alone
      const auto batch = torch::randn({4, 2});
      EXPECT_TRUE(torch::equal(plain(batch), same(batch)));
      const auto clone = std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(converted->clone());
      EXPECT_TRUE(torch::equal(clone->forward(batch), plain(batch)));
    }
  });
}

TEST(ConvertSyncBatchNorm, LeavesNamesValuesAndOptimizers) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    torch::nn::BatchNorm1d layer(BatchNormOptions(2).track_running_stats(false));
    torch::optim::SGD optimizer(layer->parameters(), 1.0);
    const auto weight = layer->weight;
    EXPECT_EQ(convert_sync_batch_norm(*layer, group), 1);
    EXPECT_TRUE(layer->weight.is_same(weight));
    EXPECT_TRUE(layer->weight.is_leaf() && layer->weight.requires_grad());
    layer(torch::randn({4, 2})).sum().backward();
    optimizer.step();
    EXPECT_EQ(layer->bias[0].item<float>(), -4);
    EXPECT_THAT(layer->named_parameters().keys(), ::testing::ElementsAre("weight", "bias"));
  });
}

TEST(ConvertSyncBatchNorm, LastGroupCounts) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const auto alone = group.split(group.rank(), 0);
    torch::nn::BatchNorm1d layer(2);
    convert_sync_batch_norm(*layer, group);
    convert_sync_batch_norm(*layer, alone);
    if (group.rank() == 0) EXPECT_TRUE(layer(torch::randn({4, 2})).defined());
  });
}

TEST(ConvertSyncBatchNorm, CheckpointsLoadIntoEitherModel) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const harness::Folder folder;
    const std::string file = folder.path() + "/run.pt";
    torch::nn::BatchNorm1d layer(2), plain(2), again(2);
    convert_sync_batch_norm(*layer, group);
    convert_sync_batch_norm(*again, group);
    layer(torch::randn({4, 2}));
    checkpoint::save(file, group, {{"model", layer}});
    checkpoint::load(file, group, {{"model", plain}});
    checkpoint::load(file, group, {{"model", again}});
    EXPECT_TRUE(torch::equal(plain->running_mean, layer->running_mean));
    const auto input = torch::full({2, 2}, double(group.rank()));
    EXPECT_TRUE(
        torch::allclose(again(input).mean(), torch::full({}, 2.0 * group.rank() - 1), 1e-3));
  });
}

TEST(ConvertSyncBatchNorm, WorksUnderAutocast) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    EXPECT_EQ(convert_sync_batch_norm(*net, group), 1);
    const AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    const auto output = net->forward(torch::full({2, 3}, double(group.rank())));
    // Rank 0's rows are below the mean of both ranks' where rank 1's are above.
    auto sum = output.to(torch::kFloat);
    group.all_reduce(sum).wait();
    EXPECT_LT(sum.abs().max().item<float>(), 0.05);
    EXPECT_GT(output.abs().max().item<float>(), 0.5);
  });
}

TEST(ConvertSyncBatchNorm, LayerWithoutTensorsIsACallerError) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    torch::nn::Sequential net(
        torch::nn::BatchNorm2d(BatchNormOptions(2).affine(false).track_running_stats(false)));
    const auto error = harness::error_of([&] { convert_sync_batch_norm(*net, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("the layer '0' has neither running statistics"));
    EXPECT_EQ(harness::error_of([&] { convert_sync_batch_norm(*net, ProcessGroup()); }).blame(),
              Blame::Caller);
    EXPECT_EQ(convert_sync_batch_norm(*torch::nn::Linear(2, 2), group), 0);
  });
}

}  // namespace
}  // namespace weft::testing
