// SPDX-License-Identifier: Apache-2.0
// ZeroRedundancyOptimizer::overlap_with on a GPU gives bit for bit the results of backward followed
// by step(). Two ranks share the GPU, so they are processes, and gradients and values travel
// through host memory (gloo).
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
constexpr int kSteps = 6;

// Returns the parameters after some steps, on the host.
std::vector<at::Tensor> trained(int rank, const std::string& meeting, bool overlapped,
                                bool as_view) {
  const c10::Device gpu(c10::kCUDA, 0);
  const auto group = init_process_group({.backend = "gloo",
                                         .init_method = "file://" + meeting,
                                         .rank = rank,
                                         .world_size = kRanks,
                                         .timeout = std::chrono::minutes(1),
                                         .device = gpu});
  testing::Mlp net(64, 128, 16);
  testing::fill(net);
  net->to(gpu);
  DistributedDataParallel ddp(net, group, {.bucket_bytes = 10'000, .first_bucket_bytes = 1});
  ZeroRedundancyOptimizer<torch::optim::Adam> zero(
      net->parameters(), group, torch::optim::AdamOptions(0.01),
      {.shard_bytes = 10'000, .parameters_as_bucket_view = as_view});
  if (overlapped) zero.overlap_with(ddp);
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    zero.zero_grad();
    const auto input =
        testing::random({32, 64}, 10 * step + static_cast<std::uint64_t>(rank)).to(gpu);
    ddp(input).pow(2).mean().backward();
    zero.step();
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().cpu());
  return result;
}

TEST(ZeroOverlapOnGpu, MatchesPlainStepsBitForBit) {
  if (tensor::cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU and libtorch's CUDA half";
  harness::run_again(kRanks, [](int rank, const std::string& folder) {
    harness::run_threads(1, [&](int) {
      for (const bool as_view : {false, true}) {
        const std::string meeting = folder + (as_view ? "/view" : "/copy");
        const auto plain = trained(rank, meeting, false, as_view);
        const auto overlapped = trained(rank, meeting + " overlapped", true, as_view);
        ASSERT_EQ(plain.size(), overlapped.size());
        for (std::size_t i = 0; i < plain.size(); ++i) {
          EXPECT_TRUE(torch::equal(plain[i], overlapped[i])) << "parameter " << i;
        }
      }
    });
  });
}

}  // namespace
}  // namespace weft
