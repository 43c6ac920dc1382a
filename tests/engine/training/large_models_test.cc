// SPDX-License-Identifier: Apache-2.0
// Models built on meta, sharded and checkpointed, train as with DistributedDataParallel. The ranks
// are processes, since dropout draws from the process's generator.
#include <gtest/gtest.h>

#include <torch/nn/modules.h>
#include <torch/optim/adamw.h>

#include <weft/fully_shard.h>
#include <weft/tests/engine/shard/sharded_models.h>
#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

struct LayerImpl : nn::Module {
  LayerImpl()
      : up(register_module("up", nn::Linear(8, 20))),
        norm(register_module("norm", nn::BatchNorm1d(20))),
        dropout(register_module("dropout", nn::Dropout(0.3))),
        down(register_module("down", nn::Linear(20, 8))) {}
  torch::Tensor forward(torch::Tensor x) { return x + down(dropout(torch::tanh(norm(up(x))))); }
  nn::Linear up;
  nn::BatchNorm1d norm;
  nn::Dropout dropout;
  nn::Linear down;
};
TORCH_MODULE(Layer);

struct NetImpl : nn::Module {
  explicit NetImpl(bool checkpoints) : checkpoints(checkpoints) {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Layer()));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = checkpoints ? checkpointed(layer, x) : layer(x);
    return x;
  }
  std::vector<Layer> layers;
  bool checkpoints;
};
TORCH_MODULE(Net);

Net on_meta(bool checkpoints) {
  const OnMeta guard;
  return Net(checkpoints);
}

template <class Wrapped>
void train(Wrapped& wrapped, Net& net, const ProcessGroup& group, bool under_autocast = false) {
  torch::manual_seed(11 + static_cast<std::uint64_t>(group.rank()));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto seed = static_cast<std::uint64_t>(100 * step + group.rank());
    std::optional<AutocastGuard> autocast;
    if (under_autocast) autocast.emplace(torch::kCPU, torch::kBFloat16);
    const auto loss = wrapped(numbers({4, 8}, seed)).square().mean();
    autocast.reset();
    loss.backward();
    optimizer.step();
  }
}

std::vector<torch::Tensor> values_of(Net& net) {
  auto all = whole(*net);
  for (const auto& buffer : net->buffers()) all.push_back(buffer.clone());
  return all;
}

std::vector<torch::Tensor> trained_by_ddp(ProcessGroup& group, bool checkpoints) {
  Net net(checkpoints);
  fill_values(*net);
  convert_sync_batch_norm(*net, group);
  DistributedDataParallel ddp(net, group);
  train(ddp, net, group);
  return values_of(net);
}

TEST(LargeModels, CheckpointingChangesNoBitWithAndWithoutSharding) {
  run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    const auto expected = trained_by_ddp(group, false);
    EXPECT_TRUE(are_equal(trained_by_ddp(group, true), expected));
    for (const bool reshards : {true, false}) {
      Net net(true);
      fill_values(*net);
      convert_sync_batch_norm(*net, group);
      FullyShardedDataParallel sharded(
          net, group, {.reshard_after_forward = reshards, .prefetch = reshards ? 1 : 0});
      train(sharded, net, group);
      EXPECT_TRUE(are_equal(values_of(net), expected));
    }
  });
}

TEST(LargeModels, OnMetaShardedCheckpointedAndSynchronizedEqualsDdp) {
  run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    Net reference = on_meta(false);
    materialize(*reference, 5);
    convert_sync_batch_norm(*reference, group);
    DistributedDataParallel ddp(reference, group);
    train(ddp, reference, group);
    Net net = on_meta(true);
    convert_sync_batch_norm(*net, group);
    FullyShardedDataParallel sharded(net, group, {.units = units_of<Layer>()});
    materialize(*net, 5);
    train(sharded, net, group);
    EXPECT_TRUE(are_equal(values_of(net), values_of(reference)));
  });
}

TEST(LargeModels, UnderAutocastNoBitDiffersEither) {
  run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    const auto by_ddp = [&](bool checkpoints) {
      Net net = on_meta(checkpoints);
      materialize(*net, 5);
      DistributedDataParallel ddp(net, group);
      train(ddp, net, group, /*under_autocast=*/true);
      return whole(*net);  // the running statistics are each rank's own
    };
    const auto expected = by_ddp(false);
    EXPECT_TRUE(are_equal(by_ddp(true), expected));
    Net net = on_meta(true);
    FullyShardedDataParallel sharded(net, group);
    materialize(*net, 5);
    train(sharded, net, group, /*under_autocast=*/true);
    EXPECT_TRUE(are_equal(whole(*net), expected));
  });
}

// The CPU's memory that tensors take at most, counted by the allocator of this process.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    present_ += bytes;
    most = std::max(most, present_);
    auto inner = under_->allocate(bytes);
    void* const data = inner.get();
    return {data, new Block{std::move(inner), bytes}, &CountingAllocator::free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  void reset() { most = present_; }
  std::size_t grown_since(std::size_t before) const { return most - before; }
  std::size_t present() const { return present_; }

  std::size_t most = 0;

 private:
  struct Block {
    c10::DataPtr memory;
    std::size_t bytes;
  };
  static void free(void* block) {
    present_ -= static_cast<Block*>(block)->bytes;
    delete static_cast<Block*>(block);
  }
  c10::Allocator* const under_ = c10::GetAllocator(c10::kCPU);
  static inline std::size_t present_ = 0;
};

TEST(LargeModels, CheckpointingAndBuildingOnMetaTakeLessMemory) {
  run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    static CountingAllocator counting;
    c10::SetAllocator(c10::kCPU, &counting, 100);
    const auto most_of = [&](bool checkpoints, nn::Sequential& net) {
      const std::size_t before = counting.present();
      counting.reset();
      auto x = numbers({512, 32}, 1);
      for (auto& layer : *net) {
        const auto block = std::dynamic_pointer_cast<BlockImpl>(layer.ptr());
        x = checkpoints ? checkpointed(block, x) : block->forward(x);
      }
      x.square().mean().backward();
      return counting.grown_since(before);
    };
    auto net = blocks(8, 32, 256);
    const std::size_t usual = most_of(false, net);
    net->zero_grad();
    const std::size_t checkpointed_bytes = most_of(true, net);
    EXPECT_LT(2 * checkpointed_bytes, usual);

    const auto big = [] { return blocks(8, 128, 512); };  // 0.5 MiB a block
    std::size_t before = counting.present();
    counting.reset();
    {
      const OnMeta guard;
      const auto model = big();
    }
    EXPECT_LT(counting.grown_since(before), std::size_t{64} << 10);
    const auto sharded_most = [&](bool is_on_meta) {
      before = counting.present();
      counting.reset();
      std::optional<OnMeta> guard;
      if (is_on_meta) guard.emplace();
      auto model = big();
      guard.reset();
      FullyShardedDataParallel sharded(model, group);
      materialize(*model, 1);
      return counting.grown_since(before);
    };
    const std::size_t built = sharded_most(false);
    const std::size_t on_meta_bytes = sharded_most(true);
    const std::size_t whole_bytes = std::size_t{8} * (2 * 128 * 512 + 128 + 512) * 4;
    EXPECT_GT(built, whole_bytes);
    // This rank's half and one layer.
    EXPECT_LT(on_meta_bytes, whole_bytes / 2 + whole_bytes / 8);
  });
}

}  // namespace
}  // namespace weft::testing
