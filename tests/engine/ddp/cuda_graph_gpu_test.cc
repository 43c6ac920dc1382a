// SPDX-License-Identifier: Apache-2.0
// Collectives and training steps captured into CUDA graphs, on a real GPU over NCCL with one rank:
// the fake driver cannot show libtorch's kernels, its allocator and autograd's threads inside a
// capture.
#include <gtest/gtest.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

namespace weft {
namespace {

using harness::error_of;

const c10::Device kGpu(c10::kCUDA, 0);

class CudaGraph : public testing::Test {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    current_ = std::make_unique<c10::cuda::CUDAStreamGuard>(
        c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
    group_ = init_process_group({.backend = "nccl",
                                 .rank = 0,
                                 .world_size = 1,
                                 .store = c10::make_intrusive<c10d::HashStore>(),
                                 .timeout = std::chrono::minutes(1),
                                 .device = kGpu});
  }

  // Ends the capture even if the body throws, and rethrows then.
  static void capture(at::cuda::CUDAGraph& graph, const std::function<void()>& body) {
    torch::cuda::synchronize();
    graph.capture_begin();
    try {
      body();
    } catch (...) {
      graph.capture_end();
      throw;
    }
    graph.capture_end();
  }

  // A model and its optimizer; equal for every instance.
  struct Training {
    explicit Training(const ProcessGroup& group, DdpOptions options = {}) {
      torch::manual_seed(1);
      net = torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::ReLU(),
                                  torch::nn::Linear(64, 8));
      net->to(kGpu);
      inputs = torch::randn({16, 32}).to(kGpu);
      labels = torch::randint(8, {16}).to(kGpu);
      ddp.emplace(net, group, options);
      optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    }
    void step() {
      optimizer->zero_grad();
      torch::nn::functional::cross_entropy(ddp->forward(inputs), labels).backward();
      optimizer->step();
    }
    torch::nn::Sequential net;
    at::Tensor inputs, labels;
    std::optional<DistributedDataParallel<torch::nn::SequentialImpl>> ddp;
    std::optional<FusedSGD> optimizer;
  };

  std::unique_ptr<c10::cuda::CUDAStreamGuard> current_;
  ProcessGroup group_;
};

TEST_F(CudaGraph, CollectivesRunAtLaunchesOnly) {
  const at::Tensor tensor = torch::ones({1 << 20}, kGpu);
  group_.all_reduce(tensor).wait();
  for (int captured = 0; captured < 10; ++captured) {
    tensor.fill_(1);
    at::cuda::CUDAGraph graph;
    capture(graph, [&] {
      tensor.mul_(2);
      group_.all_reduce(tensor).wait();
      group_.broadcast(tensor, 0).wait();
      tensor.add_(1);
    });
    torch::cuda::synchronize();
    EXPECT_TRUE(tensor.eq(1).all().item<bool>()) << "nothing has run";
    for (int launch = 0; launch < 100; ++launch) {
      tensor.fill_(launch);
      graph.replay();
      if (launch % 25 == 0) {
        EXPECT_TRUE(tensor.eq(2 * launch + 1).all().item<bool>()) << launch;
      }
    }
    torch::cuda::synchronize();
  }
  group_.all_reduce(tensor).synchronize();  // the group still works
}

TEST_F(CudaGraph, LaunchedStepEqualsTheEagerStep) {
  Training eager(group_), captured(group_);
  for (int i = 0; i < 3; ++i) eager.step();
  for (int i = 0; i < 3; ++i) captured.step();
  at::cuda::CUDAGraph graph;
  capture(graph, [&] { captured.step(); });
  for (int i = 0; i < 5; ++i) {
    eager.step();
    graph.replay();
  }
  torch::cuda::synchronize();
  for (std::size_t i = 0; i < eager.net->parameters().size(); ++i) {
    EXPECT_TRUE(
        torch::allclose(eager.net->parameters()[i], captured.net->parameters()[i], 1e-5, 1e-6))
        << i;
  }
}

TEST_F(CudaGraph, StepsWithHostWorkAreRefused) {
  Training training(group_);
  at::cuda::CUDAGraph first;
  const Error early = error_of([&] { capture(first, [&] { training.step(); }); });
  EXPECT_EQ(early.blame(), Blame::Caller);
  EXPECT_NE(early.text().find("run two steps before the capture"), std::string::npos)
      << early.text();
  for (int i = 0; i < 2; ++i) training.step();
  at::cuda::CUDAGraph again;
  capture(again, [&] { training.step(); });

  Training finds(group_, {.find_unused_parameters = true});
  for (int i = 0; i < 2; ++i) finds.step();
  at::cuda::CUDAGraph counted;
  const Error unused = error_of([&] { capture(counted, [&] { finds.step(); }); });
  EXPECT_NE(unused.text().find("capture without find_unused_parameters"), std::string::npos)
      << unused.text();
}

TEST_F(CudaGraph, HostCannotSynchronizeInACapture) {
  const at::Tensor tensor = torch::ones({8}, kGpu);
  group_.all_reduce(tensor).wait();
  at::cuda::CUDAGraph graph;
  capture(graph, [&] {
    Work work = group_.all_reduce(tensor);
    EXPECT_EQ(error_of([&] { work.synchronize(); }).blame(), Blame::Caller);
    work.wait();
  });
}

}  // namespace
}  // namespace weft
