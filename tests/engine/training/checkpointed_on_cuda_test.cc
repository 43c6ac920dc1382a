// SPDX-License-Identifier: Apache-2.0
// checkpointed() on the fake driver's GPU: the second forward, which runs on libtorch's thread of
// that GPU, finds the GPU's random numbers and autocast as the first one did.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <weft/training.h>

#include "../shard/on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::before_product;
using harness::error_of;

std::uint64_t draw(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

// Notes what each of its forwards finds.
struct Noting : torch::nn::Module {
  struct Found {
    std::uint64_t on_host, on_gpu;
    bool autocast;
    at::ScalarType dtype;
    bool operator==(const Found&) const = default;
  };
  explicit Noting(c10::Device on)
      : device(on),
        weight(register_parameter(
            "weight", at::empty({2, 2}, at::TensorOptions(at::kFloat).device(on)).fill_(3))) {}
  at::Tensor forward(const at::Tensor& x) {
    found.push_back({draw(at::kCPU), draw(device), at::autocast::is_autocast_enabled(at::kCUDA),
                     at::autocast::get_autocast_dtype(at::kCUDA)});
    return x * weight;
  }
  const c10::Device device;
  at::Tensor weight;
  std::vector<Found> found;
};

struct CheckpointedOnCuda : fake_gpu::OnFakeGpus {
  // On one rank.
  void run(const std::function<void(Rank&)>& body) {
    OnFakeGpus::run([&](Rank& rank) {
      if (rank.number() == 0) body(rank);
    });
  }
};

TEST_F(CheckpointedOnCuda, RandomNumbersAndAutocastAreThoseOfTheFirstForward) {
  run([&](Rank& rank) {
    const auto module = std::make_shared<Noting>(rank.gpu);
    at::Tensor output;
    {
      const AutocastGuard autocast(torch::kCUDA, torch::kBFloat16);
      output = checkpointed(module, rank.filled(2, 2));
    }
    // The program draws in between, and goes on behind the backward.
    const auto on_host = draw(at::kCPU), on_gpu = draw(rank.gpu);
    output.backward(rank.filled(1, 2));
    const auto next = draw(rank.gpu);
    rank.drain();
    ASSERT_EQ(module->found.size(), 2U);
    EXPECT_TRUE(module->found[0] == module->found[1]);
    EXPECT_TRUE(module->found[1].autocast);
    EXPECT_EQ(module->found[1].dtype, torch::kBFloat16);
    EXPECT_NE(module->found[0].on_gpu, on_gpu);
    EXPECT_NE(module->found[0].on_host, on_host);
    EXPECT_NE(next, on_gpu);
    EXPECT_NE(next, module->found[0].on_gpu);
    EXPECT_EQ(fake_gpu::View(module->weight.grad())[0], 2);
  });
}

TEST_F(CheckpointedOnCuda, ACaptureIsRefused) {
  run([&](Rank& rank) {
    const auto module = std::make_shared<Noting>(rank.gpu);
    const at::Tensor x = rank.filled(2, 2);
    rank.drain();
    harness::FakeDriver::Graph graph;
    ASSERT_EQ(fake_->begin_capture(rank.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              CUDA_SUCCESS);
    const Error error = error_of([&] { checkpointed(module, x); });
    ASSERT_EQ(fake_->end_capture(rank.stream(), graph), CUDA_SUCCESS);
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("cannot be captured into a CUDA graph"), std::string::npos)
        << error.text();
    EXPECT_TRUE(module->found.empty());
  });
}

}  // namespace
}  // namespace weft
