// SPDX-License-Identifier: Apache-2.0
// Sharded models on a real GPU: the fake driver cannot show libtorch's kernels, its allocator, and
// what a captured step of it computes. Two ranks share the GPU, so they are processes, and what
// they send travels through host memory (gloo). Over NCCL there is one rank.
#include <optional>

#include <gtest/gtest.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/harness/again.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

namespace weft {
namespace {

namespace nn = torch::nn;
using FullySharded = FullyShardedDataParallel<nn::SequentialImpl>;

const c10::Device kGpu(c10::kCUDA, 0);
constexpr int kRanks = 2, kSteps = 5;

bool has_no_gpu() { return tensor::cuda_device_count() == 0; }
#define SKIP_WITHOUT_GPU() \
  if (has_no_gpu()) GTEST_SKIP() << "needs a GPU and libtorch's CUDA half"

// Equal on every rank and at every call.
nn::Sequential make_net() {
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(64, 256), nn::ReLU(), nn::Linear(256, 256), nn::ReLU(),
                     nn::Linear(256, 64), nn::LayerNorm(nn::LayerNormOptions({64})),
                     nn::Linear(64, 8));
  net->to(kGpu);
  return net;
}

at::Tensor batch(int rank, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank));
  return torch::randn({16, 64}).to(kGpu);
}

template <class Wrapped, class Optimizer>
void train(Wrapped& wrapped, Optimizer& optimizer, int rank) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    wrapped(batch(rank, step)).square().mean().backward();
    optimizer.step();
  }
}

std::vector<at::Tensor> whole(nn::Sequential& net) {
  const FullParameters parameters(*net);
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : net->parameters()) values.push_back(parameter.cpu().clone());
  return values;
}

void expect_equal(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(expected[i], found[i]))
        << "parameter " << i << " differs by up to "
        << (expected[i] - found[i]).abs().max().item<double>();
  }
}

// Two ranks on the GPU, on a stream of the pool.
void run_on_gpu(const std::function<void(ProcessGroup& group)>& body) {
  harness::run_again(kRanks, [&](int rank, const std::string& folder) {
    harness::run_threads(1, [&](int) {
      auto group = init_process_group({.backend = "gloo",
                                       .init_method = "file://" + folder + "/meeting",
                                       .rank = rank,
                                       .world_size = kRanks,
                                       .timeout = std::chrono::minutes(1),
                                       .device = kGpu});
      const c10::cuda::CUDAStreamGuard current(
          c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
      body(group);
    });
  });
}

std::vector<at::Tensor> trained(ProcessGroup& group, std::optional<FullyShardOptions> options) {
  nn::Sequential net = make_net();
  const auto train_on = [&](auto&& wrapped) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    train(wrapped, optimizer, group.rank());
  };
  if (options) {
    FullySharded sharded(net, group, *options);
    train_on(sharded);
    return whole(net);
  }
  train_on(DistributedDataParallel(net, group));
  return whole(net);
}

TEST(ShardedGpu, TwoRanksTrainAsDistributedDataParallel) {
  SKIP_WITHOUT_GPU();
  run_on_gpu([](ProcessGroup& group) {
    const auto expected = trained(group, std::nullopt);
    expect_equal(expected, trained(group, FullyShardOptions{}));
    expect_equal(expected, trained(group, FullyShardOptions{.reshard_after_forward = false}));
    expect_equal(expected, trained(group, FullyShardOptions{.prefetch = 3}));
  });
}

// The optimizer computes on the host then, so the last bits may differ.
TEST(ShardedGpu, OffloadTrainsTheSame) {
  SKIP_WITHOUT_GPU();
  run_on_gpu([](ProcessGroup& group) {
    const auto expected = trained(group, FullyShardOptions{});
    const auto found = trained(group, FullyShardOptions{.offload = true});
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::allclose(expected[i], found[i], 1e-5, 1e-6)) << i;
  });
}

constexpr int kUnits = 8;
constexpr std::int64_t kWidth = 2048;
constexpr std::int64_t kUnitBytes = kWidth * kWidth * 4;

std::int64_t in_use(bool most) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  const auto& all =
      stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return most ? all.peak : all.current;
}

// The most memory is in use while the gradients of the second unit are packed: its whole gradients
// and their packed form, the packed form of the unit before, whose average is still under way, the
// first unit, gathered ahead; and this rank's rows of the gradients of all units but the first.
// With offload these rows leave: those of two units are on the GPU then, and no shards.
TEST(ShardedGpu, TheAllocatorsPeakIsTheComputedOne) {
  SKIP_WITHOUT_GPU();
  run_on_gpu([](ProcessGroup& group) {
    for (const bool offload : {false, true}) {
      nn::Sequential net;
      for (int i = 0; i < kUnits; ++i)
        net->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
      net->to(kGpu);
      FullySharded sharded(net, group, FullyShardOptions{.offload = offload});
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01));
      const at::Tensor x = torch::randn({16, kWidth}, kGpu);
      const auto step = [&] {
        optimizer.zero_grad();
        sharded(x).square().mean().backward();
        optimizer.step();
      };
      for (int i = 0; i < 3; ++i) step();
      optimizer.zero_grad();
      torch::cuda::synchronize();
      const std::int64_t before = in_use(/*most=*/false);
      c10::cuda::CUDACachingAllocator::resetPeakStats(0);
      step();
      torch::cuda::synchronize();
      const std::int64_t rows = kUnitBytes / kRanks;
      const std::int64_t shards = offload ? 0 : kUnits * rows;
      const std::int64_t gradients = (offload ? 2 : kUnits - 1) * rows;
      const double computed = static_cast<double>(before + 4 * kUnitBytes + gradients);
      EXPECT_NEAR(static_cast<double>(in_use(/*most=*/true)) / computed, 1, 0.03)
          << (offload ? "with offload" : "on the GPU") << ": computed " << computed;
      EXPECT_GE(before, shards);
      EXPECT_LE(before, shards + kUnits * rows / 2 + (64 << 20)) << "and cuBLAS's workspace";
    }
  });
}

class ShardedOverNccl : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    current_.emplace(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
    group_ = init_process_group({.backend = "cpu:gloo,cuda:nccl",
                                 .rank = 0,
                                 .world_size = 1,
                                 .store = c10::make_intrusive<c10d::HashStore>(),
                                 .timeout = std::chrono::minutes(1),
                                 .device = kGpu});
  }

  struct Training {
    explicit Training(const ProcessGroup& group) : sharded(net, group) {
      optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    }
    void step() {
      optimizer->zero_grad();
      sharded(x).square().mean().backward();
      optimizer->step();
    }
    nn::Sequential net = make_net();
    at::Tensor x = batch(0, 0);
    FullySharded sharded;
    std::optional<FusedSGD> optimizer;
  };

  std::optional<c10::cuda::CUDAStreamGuard> current_;
  ProcessGroup group_;
};

TEST_F(ShardedOverNccl, LaunchedStepsEqualEagerSteps) {
  Training eager(group_), captured(group_);
  for (int i = 0; i < 3; ++i) eager.step();
  for (int i = 0; i < 3; ++i) captured.step();
  torch::cuda::synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  captured.step();
  graph.capture_end();
  for (int i = 0; i < kSteps; ++i) {
    eager.step();
    graph.replay();
  }
  torch::cuda::synchronize();
  const auto expected = eager.net->parameters(), found = captured.net->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::allclose(expected[i], found[i], 1e-5, 1e-6)) << i;
}

TEST_F(ShardedOverNccl, TheFirstStepIsNotCaptured) {
  Training training(group_);
  torch::cuda::synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const Error error = harness::error_of([&] { training.step(); });
  graph.capture_end();
  EXPECT_NE(error.text().find("run two steps before the capture"), std::string::npos)
      << error.text();
}

// The second forward draws the GPU's random numbers again, on libtorch's thread for that GPU.
TEST(CheckpointedGpu, DropoutIsTheSameInBothForwards) {
  SKIP_WITHOUT_GPU();
  nn::Sequential net(nn::Linear(64, 256), nn::Dropout(0.3), nn::Linear(256, 64));
  net->to(kGpu);
  const at::Tensor x = torch::randn({16, 64}, kGpu);
  const auto gradients = [&](bool checkpoints) {
    net->zero_grad();
    torch::manual_seed(3);
    std::optional<AutocastGuard> autocast(std::in_place, torch::kCUDA, torch::kBFloat16);
    const at::Tensor y = checkpoints ? checkpointed(net, x) : net->forward(x);
    autocast.reset();
    static_cast<void>(torch::rand({5}, kGpu));
    y.to(torch::kFloat).square().sum().backward();
    std::vector<at::Tensor> found;
    for (const at::Tensor& parameter : net->parameters()) found.push_back(parameter.grad().clone());
    return found;
  };
  const auto expected = gradients(false), found = gradients(true);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::allclose(expected[i], found[i], 1e-5, 1e-6)) << i;
}

}  // namespace
}  // namespace weft
