// SPDX-License-Identifier: Apache-2.0
// Sharded models on the fake driver's GPUs, one for each rank: what waits for what, and when memory
// is free again.
#include <algorithm>

#include <weft/profiling/trace/flight_recorder.h>

#include "on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::expect_gradients;
using fake_gpu::Product;
using fake_gpu::Sharded;
using ShardedOnCuda = fake_gpu::OnFakeGpus;

TEST_F(ShardedOnCuda, GradientsAreAverages) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    step(sharded, rank);
    rank.drain();
    expect_gradients(*model, 2);
  });
}

TEST_F(ShardedOnCuda, TheFlightRecorderNamesUnits) {
  run([&](Rank& rank) {
    FullyShardedDataParallel sharded(std::make_shared<Product>(rank.gpu), rank.group);
    step(sharded, rank);
    rank.drain();
  });
  for (const char* name : {"all_gather", "reduce_scatter"}) {
    EXPECT_TRUE(std::ranges::any_of(trace::flight_recorder().read(),
                                    [&](const trace::Record& record) {
                                      return std::string_view(record.name) == name &&
                                             std::string_view(record.called_by) ==
                                                 "FullyShardedDataParallel's unit 'part1'";
                                    }))
        << name;
  }
}

// The optimizer's step is still to run when forward and backward are enqueued.
TEST_F(ShardedOnCuda, AStepHoldsStreamsNotTheHost) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    warm_up(sharded, rank);
    const int blocked = fake_->host_blocks();
    fake_->hold(rank.stream());
    set_weights(*model, 3);
    step(sharded, rank);
    EXPECT_EQ(fake_->host_blocks(), blocked);
    meet();
    fake_->release(rank.stream());
    rank.drain();
    expect_gradients(*model, 3);
  });
}

TEST_F(ShardedOnCuda, TheNextUnitIsGatheredBesideTheKernelsOfThisOne) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    expect_gather_beside_kernels(sharded, rank);
    rank.drain();
  });
}

constexpr std::int64_t kRows = 1000;
constexpr std::size_t kUnitBytes = 8192;                     // rounded up
constexpr std::size_t kGradientBytes = (2 * kRows + 2) * 4;  // and a number for each rank

// The host enqueues a whole step before the GPU begins with it.
TEST_F(ShardedOnCuda, MemoryInUseDoesNotDependOnHowFarTheHostIsAhead) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kRows);
    Sharded sharded(model, rank.group);
    warm_up(sharded, rank, kRows);
    forget_most(rank);
    fake_->hold(rank.stream());
    step(sharded, rank, kRows);
    EXPECT_EQ(memory_->most(rank.gpu, kUnitBytes), 2) << "the unit and the one that comes next";
    EXPECT_EQ(memory_->most(rank.gpu, kGradientBytes), 2) << "units whose gradients are averaged";
    meet();
    fake_->release(rank.stream());
    rank.drain();
    expect_gradients(*model, 2);
  });
  EXPECT_EQ(torch_->recorded_uses(), 0);
}

// A unit that is gathered ahead in vain.
TEST_F(ShardedOnCuda, AForgottenGatherIsOverBeforeItsMemoryIsUsedAgain) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kRows);
    Sharded sharded(model, rank.group);
    warm_up(sharded, rank, kRows);
    model->used = 1;  // the second unit has been gathered by the end of the forward
    fake_->hold(rank.stream());
    const at::Tensor output = forward(sharded, rank, kRows);
    // As large as a unit.
    std::vector<at::Tensor> others;
    for (int i = 0; i < 3; ++i) others.push_back(rank.filled(-1, kUnitBytes / 8));
    meet();
    fake_->release(rank.stream());
    rank.drain();
    rank.group.barrier().synchronize();  // behind the gather
    for (const at::Tensor& other : others) {
      const fake_gpu::View values(other);
      for (std::int64_t i = 0; i < values.count; ++i) ASSERT_EQ(values[i], -1) << i;
    }
    EXPECT_EQ(fake_gpu::View(output)[0], 2 * (rank.number() + 1));
  });
}

// The streams of the forward, and of what uses its output, differ.
TEST_F(ShardedOnCuda, AUnitThatTwoStreamsUseIsFreedBehindBoth) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kRows);
    Sharded sharded(model, rank.group);
    warm_up(sharded, rank, kRows);
    const c10::Stream side = torch_->new_stream(rank.number());
    const at::Tensor ones = rank.filled(1, kRows);
    rank.drain();
    at::Tensor seen;
    model->in_forward = [&] {  // begins to read the first unit on a stream that is held
      rank.drain();
      fake_->hold(torch_->view(side));
      const c10::StreamGuard current(side);
      const torch::NoGradGuard no_grad;
      seen = ones * model->parts[0]->weight;
    };
    const at::Tensor output = forward(sharded, rank, kRows);
    meet();
    fake_->release(torch_->view(side));
    rank.drain();
    {
      const c10::StreamGuard current(side);
      rank.drain();
    }
    const fake_gpu::View values(seen);
    for (std::int64_t i = 0; i < values.count; ++i) ASSERT_EQ(values[i], 2) << i;
  });
}

}  // namespace
}  // namespace weft
