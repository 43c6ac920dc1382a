// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel on a stream of the user's own, without the host ever waiting: each pass
// gives its own average, and no later one overwrites it too early. Two ranks share the GPU, so they
// are processes, and their gradients travel through host memory (gloo).
#include <optional>

#include <gtest/gtest.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/harness/again.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

namespace weft {
namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 1000;

// The gradient of rank r in pass i is (r + 1) i, exactly.
void expect_every_average(int rank, const std::string& folder, c10::Device device) {
  auto group = init_process_group({.backend = "gloo",
                                   .init_method = "file://" + folder + "/meeting",
                                   .rank = rank,
                                   .world_size = kRanks,
                                   .timeout = std::chrono::minutes(1),
                                   .device = device});
  std::optional<c10::StreamGuard> side;
  if (device.is_cuda())
    side.emplace(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(device));
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  net->to(device);
  DistributedDataParallel ddp(net, group);
  const auto numbers = torch::arange(kSteps, device).to(at::kFloat) * (rank + 1);
  std::vector<at::Tensor> seen;
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad(/*set_to_none=*/step % 2 == 0);
    ddp(numbers.narrow(0, step, 1)).sum().backward();
    const auto average = net->weight.grad().clone();
    group.all_reduce(average).wait();  // includes the other rank's write-back
    seen.push_back(average.view({1}));
  }
  const auto expected = torch::arange(kSteps).to(at::kFloat) * (kRanks + 1);
  EXPECT_TRUE(torch::equal(torch::cat(seen).cpu(), expected));
}

void expect_every_average(c10::Device device) {
  harness::run_again(kRanks, [device](int rank, const std::string& folder) {
    harness::run_threads(1, [&](int) { expect_every_average(rank, folder, device); });
  });
}

TEST(SideStream, AveragesAreRightOnTheHost) { expect_every_average(at::kCPU); }

TEST(SideStream, AveragesNeedNoHostWait) {
  if (tensor::cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU and libtorch's CUDA half";
  expect_every_average(c10::Device(at::kCUDA, 0));
}

}  // namespace
}  // namespace weft
