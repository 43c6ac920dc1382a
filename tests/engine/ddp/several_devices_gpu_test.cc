// SPDX-License-Identifier: Apache-2.0
// A model on more than one device of a rank trains like the same model on one device. Two ranks
// share the GPUs, so they are processes, and their gradients travel through host memory (gloo).
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/engine/ddp/models.h>
#include <weft/tests/harness/again.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

namespace weft {
namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 4;
const c10::Device kHost(c10::kCPU);
const c10::Device kGpu(c10::kCUDA, 0);
const c10::Device kSecondGpu(c10::kCUDA, 1);

// Has its outer layers on one device, the middle one and a buffer on another.
struct SplitImpl : torch::nn::Module {
  SplitImpl(c10::Device of_outer, c10::Device of_inner) : outer(of_outer), inner(of_inner) {
    register_module("mlp", mlp);
    testing::fill(mlp);
    steps = register_buffer("steps", torch::zeros({1}, torch::kDouble));
    mlp->to(outer);
    mlp->second->to(inner);
    steps = steps.to(inner);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(mlp->first(x.to(outer))).to(inner);
    x = torch::tanh(mlp->second(x)).to(outer);
    return mlp->third(x);
  }
  c10::Device outer, inner;
  testing::Mlp mlp;
  torch::Tensor steps;
};
TORCH_MODULE(Split);

class SeveralDevices : public ::testing::Test {
 protected:
  static void need(int gpus) {
    const int there = tensor::cuda_device_count();
    if (there < gpus)
      GTEST_SKIP() << "needs " << gpus << " GPUs and libtorch's CUDA half; there are " << there;
  }

  // Returns the parameters after some steps, on the host.
  static std::vector<at::Tensor> trained(int rank, const std::string& meeting, c10::Device outer,
                                         c10::Device inner, bool compressed) {
    const auto group = init_process_group({.backend = "gloo",
                                           .init_method = "file://" + meeting,
                                           .rank = rank,
                                           .world_size = kRanks,
                                           .timeout = std::chrono::minutes(1),
                                           .device = outer});
    Split net(outer, inner);
    DistributedDataParallel<SplitImpl> ddp(net, group);
    if (compressed) ddp.register_comm_hook(comm_hooks::bf16_compress(group));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      const auto x = testing::part(testing::random({8, 6}, 10 + step), rank, kRanks);
      optimizer.zero_grad();
      ddp(x).square().mean().backward();
      optimizer.step();
    }
    std::vector<at::Tensor> result;
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().to(kHost));
    return result;
  }

  static void expect_as_on_one_device(c10::Device outer, c10::Device inner) {
    harness::run_again(kRanks, [&](int rank, const std::string& folder) {
      harness::run_threads(1, [&](int) {
        for (const bool compressed : {false, true}) {
          const std::string meeting = folder + (compressed ? "/compressed" : "/exact");
          const auto there = trained(rank, meeting, outer, inner, compressed);
          const auto on_host = trained(rank, meeting + " on the host", kHost, kHost, compressed);
          EXPECT_LT(testing::difference(there, on_host), compressed ? 1e-2 : 1e-9);
        }
      });
    });
  }
};

class OfOneGpu : public SeveralDevices {
  void SetUp() override { need(1); }
};
class OfTwoGpus : public SeveralDevices {
  void SetUp() override { need(2); }
};

TEST_F(OfOneGpu, GpuAndHostTrainLikeTheHost) { expect_as_on_one_device(kGpu, kHost); }

TEST_F(OfTwoGpus, TwoGpusTrainLikeTheHost) { expect_as_on_one_device(kGpu, kSecondGpu); }

}  // namespace
}  // namespace weft
