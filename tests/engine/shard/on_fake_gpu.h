// SPDX-License-Identifier: Apache-2.0
// For tests of sharded models on the fake driver's GPUs, one for each rank. libtorch has no kernels
// there, so these give it the few that a model of products and its sharding need. Work is enqueued
// on the current stream and finds its memory when it runs, so memory that was freed too early, or
// written too late, shows.
#pragma once

#include <barrier>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/module.h>

#include <weft/engine/group/core.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/fully_shard.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/harness/ranks.h>

namespace weft::fake_gpu {

extern harness::FakeDriver* driver;
extern harness::FakeTorchCuda* cuda_of_torch;
// Called before this thread's next product is enqueued.
extern thread_local std::function<void()> before_product;

// As libtorch's allocator: memory that was freed is given out again at once, for the same stream.
// So what another stream still reads or writes by then is overwritten, and results are wrong.
class CachingAllocator final : public c10::Allocator,
                               public std::enable_shared_from_this<CachingAllocator> {
 public:
  explicit CachingAllocator(c10::Allocator* below) : below_(below) {}
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void*, const void*, std::size_t) const override;
  // The most blocks of that size that were in use on a device at one time since forget_most().
  int most(c10::Device device, std::size_t bytes) const;
  void forget_most();
  // Frees what is not in use.
  void clear();

 private:
  using Key = std::tuple<c10::DeviceIndex, c10::StreamId, std::size_t>;
  struct Block;
  static void free(void* block);
  struct Count {
    int now = 0, most = 0;
  };

  c10::Allocator* const below_;
  mutable std::mutex mutex_;
  std::map<Key, std::vector<c10::DataPtr>> idle_;
  std::map<std::pair<c10::DeviceIndex, std::size_t>, Count> counts_;
};

// The operation that has begun last, and the gathers behind it that have ended, on all ranks
// together.
std::uint64_t last_operation();
std::ptrdiff_t ended_gathers(std::uint64_t after);

// Gives libtorch the kernels, once a process.
void give_kernels();

// Where a kernel finds the elements of a float tensor when it runs; it does not keep the memory.
struct View {
  explicit View(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        data(tensor.numel() == 0 ? nullptr : static_cast<float*>(tensor.mutable_data_ptr())),
        count(tensor.numel()) {}
  float& operator[](std::int64_t element) const {
    std::int64_t offset = 0;
    for (std::size_t i = sizes.size(); i-- > 0; element /= sizes[i])
      offset += element % sizes[i] * strides[i];
    return data[offset];
  }
  std::vector<std::int64_t> sizes, strides;
  float* data;
  std::int64_t count;
};

struct Scaled : torch::nn::Module {
  explicit Scaled(at::Tensor values) : weight(register_parameter("weight", std::move(values))) {}
  at::Tensor weight;
};

// The product of the input and all weights, of which the first `used` are used.
struct Product : torch::nn::Module {
  static constexpr int kParts = 4;
  explicit Product(c10::Device device, std::int64_t rows = 3) {
    for (int i = 0; i < kParts; ++i) {
      const at::Tensor values = at::empty({rows, 2}, at::TensorOptions(at::kFloat).device(device));
      values.fill_(i + 2);
      parts.push_back(
          register_module("part" + std::to_string(i), std::make_shared<Scaled>(values)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < used; ++i) {
      x = x * parts[i]->weight;
      if (i == 0 && in_forward) in_forward();
      if (i == 0 && in_backward) x.register_hook([this](const at::Tensor&) { in_backward(); });
    }
    return x;
  }
  std::vector<std::shared_ptr<Scaled>> parts;
  std::size_t used = kParts;
  std::function<void()> in_forward;   // called behind the first part
  std::function<void()> in_backward;  // called before the first part's kernels are enqueued
};

using Sharded = FullyShardedDataParallel<Product>;

class OnFakeGpus : public ::testing::Test {
 protected:
  struct Rank {
    int number() const { return group.rank(); }
    cuda::StreamRef stream() const {
      return cuda_of_torch->view(cuda_of_torch->current(gpu.index()));
    }
    // The host waits for the current stream.
    void drain() {
      EXPECT_TRUE(devices->ready(gpu).synchronize(Deadline::in(std::chrono::seconds(20))));
    }
    at::Tensor filled(float value, std::int64_t rows = 3) const {
      const at::Tensor made = at::empty({rows, 2}, at::TensorOptions(at::kFloat).device(gpu));
      made.fill_(value);
      return made;
    }

    ProcessGroup group;
    c10::Device gpu;
    std::shared_ptr<tensor::CudaDevices> devices;
  };

  void SetUp() override;
  void TearDown() override;
  // Two ranks, each on its GPU with a stream of its own.
  void run(const std::function<void(Rank&)>& body, const std::string& backend = "gloo");

  // The input is 1 and 2, by rank.
  static at::Tensor forward(Sharded& sharded, const Rank& rank, std::int64_t rows = 3) {
    return sharded(rank.filled(static_cast<float>(rank.gpu.index() + 1), rows));
  }
  static void step(Sharded& sharded, const Rank& rank, std::int64_t rows = 3) {
    drop_gradients(*sharded.module());
    forward(sharded, rank, rows).backward(rank.filled(1, rows));
  }

  static void drop_gradients(const Product& model) {
    for (const auto& shard : model.parameters()) shard.mutable_grad().reset();
  }
  // Writes first, first + 1, … into the shards of the parts.
  static void set_weights(const Product& model, float first);
  // Trains one step with each of these first weights.
  static void expect_training(Sharded& sharded, const Rank& rank,
                              std::initializer_list<float> first, std::int64_t rows = 3);

  // Both ranks come.
  void meet() { meeting_.arrive_and_wait(); }
  // Both ranks come when they have made two steps, and nothing is enqueued on their streams.
  void warm_up(Sharded& sharded, Rank& rank, std::int64_t rows = 3);
  // The last operation so far, for both ranks, which come when nothing is enqueued on their
  // streams.
  std::uint64_t operation_until_now(Rank& rank);
  // Begins to count anew the blocks that are in use at one time.
  void forget_most(Rank& rank);
  // Makes a step, in which both ranks' second units are gathered before the kernels of the first
  // ones may run.
  void expect_gather_beside_kernels(Sharded& sharded, Rank& rank);

  std::unique_ptr<harness::FakeDriver> fake_;
  std::unique_ptr<harness::FakeTorchCuda> torch_;
  std::shared_ptr<CachingAllocator> memory_;

 private:
  std::barrier<> meeting_{2};
};

// The gradients after one step with the weights first, first + 1, …, `times` over.
void expect_gradients(const Product& model, float first, float times = 1);

}  // namespace weft::fake_gpu
