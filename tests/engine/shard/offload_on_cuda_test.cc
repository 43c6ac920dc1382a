// SPDX-License-Identifier: Apache-2.0
// Sharded models whose shards are in host memory (FullyShardOptions::offload), on the fake driver's
// GPUs: what the host waits for, and what it does not.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/training.h>

#include "on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::expect_gradients;
using fake_gpu::Product;
using fake_gpu::Sharded;
using fake_gpu::View;

struct OffloadOnCuda : fake_gpu::OnFakeGpus {
  static Sharded offloaded(const std::shared_ptr<Product>& model, const Rank& rank) {
    return Sharded(model, rank.group, FullyShardOptions{.offload = true});
  }
};

TEST_F(OffloadOnCuda, ShardsAndGradientsAreInPinnedMemory) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    expect_training(sharded, rank, {2, 3, 5});  // nothing waits for the device here
    for (const auto& shard : model->parameters()) {
      EXPECT_TRUE(shard.is_cpu() && shard.is_pinned());
      EXPECT_TRUE(shard.grad().is_cpu() && shard.grad().is_pinned());
    }
  });
}

TEST_F(OffloadOnCuda, OptimizersOfTheHostTrain) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    step(sharded, rank);
    optimizer.step();
    const float product = 2 * 3 * 4 * 5;
    for (int i = 0; i < Product::kParts; ++i) {
      const float before = static_cast<float>(i + 2);
      EXPECT_EQ(View(model->parameters()[static_cast<std::size_t>(i)])[0],
                before - 0.5F * 1.5F * product / before);
    }
  });
}

// Work of other streams, and the next unit's kernels, do not keep the host.
TEST_F(OffloadOnCuda, OnlyTheEndOfBackwardWaitsAndOnlyForItsGradients) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    const at::Tensor ones = rank.filled(1);
    warm_up(sharded, rank);
    drop_gradients(*model);
    const int blocked = fake_->host_blocks();
    const c10::Stream other = torch_->new_stream(rank.number());
    fake_->hold(torch_->view(other));
    {
      const c10::StreamGuard current(other);
      static_cast<void>(rank.filled(7));
    }
    fake_->hold(rank.stream());
    const at::Tensor output = forward(sharded, rank);  // returns
    EXPECT_EQ(fake_->host_blocks(), blocked);
    meet();
    std::atomic<bool> released{false};
    std::thread releases([&, stream = rank.stream()] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      released = true;
      fake_->release(stream);
    });
    output.backward(ones);
    EXPECT_TRUE(released) << "backward returned before the gradients had come";
    releases.join();
    expect_gradients(*model, 2);
    fake_->release(torch_->view(other));
  });
}

TEST_F(OffloadOnCuda, TheNextUnitComesFromTheHostBesideTheKernelsOfThisOne) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    expect_gather_beside_kernels(sharded, rank);
    expect_gradients(*model, 2);
  });
}

// The gradients of the last units go to the host before the kernels of the first one are enqueued.
TEST_F(OffloadOnCuda, GradientsLeaveBesideTheKernelsOfBackward) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    warm_up(sharded, rank);
    drop_gradients(*model);
    const auto left = [&] { return std::ranges::count(fake_->executed(), "copy out"); };
    const auto before = left();
    bool is_gone = false;
    model->in_backward = [&] { is_gone = harness::comes_true([&] { return left() > before; }); };
    forward(sharded, rank).backward(rank.filled(1));
    EXPECT_TRUE(is_gone);
    expect_gradients(*model, 2);
  });
}

constexpr std::int64_t kManyRows = 1000;
constexpr std::size_t kAverageBytes = (kManyRows + 1) * 4;  // half the rows, and a number

// One that is averaged, one that has been, and one that leaves.
TEST_F(OffloadOnCuda, GradientsOfThreeUnitsAreOnTheGpuAtMost) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kManyRows);
    Sharded sharded = offloaded(model, rank);
    warm_up(sharded, rank, kManyRows);
    forget_most(rank);
    expect_training(sharded, rank, {2, 3}, kManyRows);
    EXPECT_EQ(memory_->most(rank.gpu, kAverageBytes), 3);
  });
  EXPECT_EQ(torch_->recorded_uses(), 0);
}

TEST_F(OffloadOnCuda, AnotherBackwardAddsToTheGradients) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    fake_->delay(&cuda::Driver::launch_kernel, std::chrono::milliseconds(2));
    step(sharded, rank);
    forward(sharded, rank).backward(rank.filled(1));
    expect_gradients(*model, 2, 2);
    {
      const auto no_sync = sharded.no_sync();
      forward(sharded, rank).backward(rank.filled(1));
    }
    expect_gradients(*model, 2, 2);
    forward(sharded, rank).backward(rank.filled(1));
    expect_gradients(*model, 2, 4);
    rank.drain();
  });
}

TEST_F(OffloadOnCuda, HooksOfShardsSeeWholeGradients) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    fake_->delay(&cuda::Driver::launch_kernel, std::chrono::milliseconds(2));
    float seen = 0;
    model->parameters()[0].register_hook(
        [&](const at::Tensor& gradient) { seen = View(gradient)[0]; });
    step(sharded, rank);
    EXPECT_EQ(seen, 1.5F * 3 * 4 * 5);
    rank.drain();
  });
}

TEST_F(OffloadOnCuda, AParameterThatOneRankLeavesOutIsAveraged) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group,
                    FullyShardOptions{.offload = true, .units = [](const auto&, const auto&) {
                                        return false;  // one unit
                                      }});
    model->used = rank.number() == 0 ? 3 : 4;
    step(sharded, rank);
    EXPECT_EQ(View(model->parameters()[0].grad())[0], (3 * 4 + 2 * 3 * 4 * 5) / 2);
    EXPECT_EQ(View(model->parameters()[3].grad())[0], 2 * 2 * 3 * 4 / 2);
    model->used = 3;
    step(sharded, rank);
    EXPECT_FALSE(model->parameters()[3].grad().defined());
    expect_gradients(*model, 2);
  });
}

// The program may write to the shards when a forward without gradients has returned.
TEST_F(OffloadOnCuda, AnEvaluationHasReadTheShardsWhenItReturns) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    step(sharded, rank);
    rank.drain();
    fake_->delay(&cuda::Driver::launch_kernel, std::chrono::milliseconds(5));
    at::Tensor output;
    {
      const torch::NoGradGuard no_grad;
      output = forward(sharded, rank);
    }
    set_weights(*model, 100);
    rank.drain();
    EXPECT_EQ(View(output)[0], 120 * (rank.number() + 1));
  });
}

TEST_F(OffloadOnCuda, FullParametersAreOnTheGpuAndWritable) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    {
      const FullParameters whole(*model, /*writable=*/true);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        EXPECT_EQ(parameter.device(), rank.gpu);
        EXPECT_EQ(parameter.size(0), 3);
        parameter.fill_(9);
      }
    }
    for (const auto& shard : model->parameters()) {
      EXPECT_TRUE(shard.is_cpu());
      EXPECT_EQ(View(shard)[0], 9);
    }
    step(sharded, rank);
    EXPECT_EQ(View(model->parameters()[0].grad())[0], 1.5F * 9 * 9 * 9);
  });
}

TEST_F(OffloadOnCuda, ClippingIsOverAllShards) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    step(sharded, rank);
    double squares = 0;
    for (int i = 0; i < Product::kParts; ++i) squares += 6 * std::pow(1.5 * 120 / (i + 2), 2);
    const at::Tensor norm = clip_grad_norm_(*model, 1);
    EXPECT_NEAR(norm.item<double>(), std::sqrt(squares), 1e-3);
    EXPECT_NEAR(View(model->parameters()[0].grad())[0], 1.5 * 60 / std::sqrt(squares), 1e-4);
  });
}

TEST_F(OffloadOnCuda, EveryOptionTrainsTheSame) {
  run([&](Rank& rank) {
    const FullyShardOptions all[] = {{.offload = true, .prefetch = 0},
                                     {.offload = true, .prefetch = 3},
                                     {.reshard_after_forward = false, .offload = true}};
    for (const FullyShardOptions& options : all) {
      const auto model = std::make_shared<Product>(rank.gpu);
      Sharded sharded(model, rank.group, options);
      expect_training(sharded, rank, {2, 3, 5});
    }
  });
}

// Each rank has all rows, and gradients are averaged by an all-reduce behind the reduce-scatter.
TEST_F(OffloadOnCuda, ReplicasAreAveragedBeforeGradientsLeave) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    const Mesh mesh(rank.group, {{"replicate", 2}, {"shard", 1}});
    Sharded sharded(model, mesh, FullyShardOptions{.offload = true});
    fake_->delay(&cuda::Driver::launch_kernel, std::chrono::milliseconds(1));
    expect_training(sharded, rank, {2, 3});
    rank.drain();
  });
}

TEST_F(OffloadOnCuda, ALostRankFailsTheBackward) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded = offloaded(model, rank);
    for (int i = 0; i < 2; ++i) step(sharded, rank);
    const at::Tensor ones = rank.filled(1);
    const at::Tensor output = forward(sharded, rank);
    rank.drain();
    meet();
    if (rank.number() == 1) {
      rank.group.abort("the test lets rank 1 fail");
    } else {
      const Error error = harness::error_of([&] { output.backward(ones); });
      EXPECT_NE(error.text().find("the test lets rank 1 fail"), std::string::npos) << error.text();
    }
    meet();
  });
}

// On the CPU the shards are in host memory anyway.
TEST(OffloadOnTheHost, ChangesNothing) {
  std::vector<at::Tensor> seen;
  for (const bool offload : {false, true}) {
    std::vector<at::Tensor> of_rank_0;
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup& group) {
      torch::nn::Linear net(5, 3);
      {
        const torch::NoGradGuard no_grad;
        net->weight.fill_(0.5);
        net->bias.fill_(0.25);
      }
      FullyShardedDataParallel sharded(net, group, FullyShardOptions{.offload = offload});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        sharded(at::full({2, 5}, group.rank() + 1.0)).square().sum().backward();
        optimizer.step();
      }
      const FullParameters whole(*net);
      if (group.rank() == 0) of_rank_0 = {net->weight.detach().clone(), net->bias.detach().clone()};
    });
    if (seen.empty()) {
      seen = of_rank_0;
    } else {
      for (std::size_t i = 0; i < seen.size(); ++i)
        EXPECT_TRUE(at::equal(seen[i], of_rank_0[i])) << i;
    }
  }
}

}  // namespace
}  // namespace weft
