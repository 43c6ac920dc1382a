// SPDX-License-Identifier: Apache-2.0
// Two trainers, each with its own GPU, in autograd contexts. ddp_test.cc has the same on the CPU.
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/engine/autograd/trainers.h>

namespace weft {
namespace {

constexpr int kTrainers = 2;

class DdpOnGpusInContexts : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const int gpus = tensor::cuda_device_count();
    if (gpus < kTrainers)
      GTEST_SKIP() << "needs " << kTrainers << " GPUs and libtorch's CUDA half; there are " << gpus;
  }
};

TEST_P(DdpOnGpusInContexts, RemoteCpuLayersAlternateWithDdp) {
  const auto gpu_of = [](int rank) {
    return c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
  };
  hybrid::train(
      {harness::As::Threads, GetParam()}, kTrainers + 1, kTrainers,
      [&](rpc::Agent& agent, ProcessGroup& group) {
        hybrid::alternate_layers(agent, group, /*remote=*/kTrainers, gpu_of(agent.self().rank));
      },
      "cpu:gloo,cuda:nccl", gpu_of);
}

INSTANTIATE_TEST_SUITE_P(Autograd, DdpOnGpusInContexts, testing::Values("inproc", "shm", "tcp"));

}  // namespace
}  // namespace weft
