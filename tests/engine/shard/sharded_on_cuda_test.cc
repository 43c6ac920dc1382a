// SPDX-License-Identifier: Apache-2.0
// Sharded models on the fake driver's GPUs, one for each rank: what waits for what, and when memory
// is free again.
#include <algorithm>
#include <barrier>

#include "on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::before_product;
using fake_gpu::ended_gathers;
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
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    for (int i = 0; i < 2; ++i) step(sharded, rank);
    rank.drain();
    meeting.arrive_and_wait();
    const int blocked = fake_->host_blocks();
    fake_->hold(rank.stream());
    {
      const torch::NoGradGuard no_grad;
      float value = 3;
      for (auto& shard : model->parameters()) shard.fill_(value++);
    }
    step(sharded, rank);
    EXPECT_EQ(fake_->host_blocks(), blocked);
    meeting.arrive_and_wait();
    fake_->release(rank.stream());
    rank.drain();
    expect_gradients(*model, 3);
  });
}

TEST_F(ShardedOnCuda, TheNextUnitIsGatheredBesideTheKernelsOfThisOne) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    step(sharded, rank);
    rank.drain();
    meeting.arrive_and_wait();
    const auto before = fake_gpu::last_operation();
    meeting.arrive_and_wait();
    before_product = [&] {  // the first product of forward
      rank.drain();         // until its unit is gathered
      fake_->hold(rank.stream());
      meeting.arrive_and_wait();
      EXPECT_TRUE(harness::comes_true([&] { return ended_gathers(before) == 4; }))
          << "two units on two ranks; there are " << ended_gathers(before);
      meeting.arrive_and_wait();
      fake_->release(rank.stream());
    };
    step(sharded, rank);
    rank.drain();
  });
}

constexpr std::int64_t kRows = 1000;
constexpr std::size_t kUnitBytes = 8192;                     // rounded up
constexpr std::size_t kGradientBytes = (2 * kRows + 2) * 4;  // and a number for each rank

// The host enqueues a whole step before the GPU begins with it.
TEST_F(ShardedOnCuda, MemoryInUseDoesNotDependOnHowFarTheHostIsAhead) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kRows);
    Sharded sharded(model, rank.group);
    for (int i = 0; i < 2; ++i) step(sharded, rank, kRows);
    rank.drain();
    meeting.arrive_and_wait();
    if (rank.number() == 0) memory_->forget_most();
    meeting.arrive_and_wait();
    fake_->hold(rank.stream());
    step(sharded, rank, kRows);
    EXPECT_EQ(memory_->most(rank.gpu, kUnitBytes), 2) << "the unit and the one that comes next";
    EXPECT_EQ(memory_->most(rank.gpu, kGradientBytes), 2) << "units whose gradients are averaged";
    meeting.arrive_and_wait();
    fake_->release(rank.stream());
    rank.drain();
    expect_gradients(*model, 2);
  });
  EXPECT_EQ(torch_->recorded_uses(), 0);
}

// A unit that is gathered ahead in vain.
TEST_F(ShardedOnCuda, AForgottenGatherIsOverBeforeItsMemoryIsUsedAgain) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kRows);
    Sharded sharded(model, rank.group);
    for (int i = 0; i < 2; ++i) step(sharded, rank, kRows);
    model->used = 1;  // the second unit has been gathered by the end of the forward
    rank.drain();
    meeting.arrive_and_wait();
    fake_->hold(rank.stream());
    const at::Tensor output = forward(sharded, rank, kRows);
    // As large as a unit.
    std::vector<at::Tensor> others;
    for (int i = 0; i < 3; ++i) others.push_back(rank.filled(-1, kUnitBytes / 8));
    meeting.arrive_and_wait();
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
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu, kRows);
    Sharded sharded(model, rank.group);
    for (int i = 0; i < 2; ++i) step(sharded, rank, kRows);
    rank.drain();
    meeting.arrive_and_wait();
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
    meeting.arrive_and_wait();
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
