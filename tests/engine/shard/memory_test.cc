// SPDX-License-Identifier: Apache-2.0
// How much memory a rank needs for a sharded transformer: no more than its part of parameters,
// gradients and Adam's moments, the units that are gathered, and the gradients under way.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/optim/adamw.h>

#include <weft/tests/harness/ranks.h>

#include "transformer.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;

// Stands in the place of libtorch's allocator, and counts the memory of all tensors on the host.
// Larger blocks than this test's come from a ReceivePool, which it would not see.
class Counting final : public c10::Allocator {
 public:
  // From now on in this process.
  static Counting& install() {
    c10::SetCPUAllocator(&the(), /*priority=*/1);
    return the();
  }
  // Some of libtorch asks that the context is the data, so the size stands in front of the data.
  c10::DataPtr allocate(std::size_t bytes) override {
    char* const block = static_cast<char*>(std::aligned_alloc(kFront, kFront + rounded(bytes)));
    if (block == nullptr) throw std::bad_alloc();
    std::memcpy(block, &bytes, sizeof bytes);
    const std::size_t now = now_ += bytes;
    std::size_t most = most_;
    while (most < now && !most_.compare_exchange_weak(most, now)) continue;
    return {block + kFront, block + kFront, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::size_t now() const { return now_; }
  // The most since the last call.
  std::size_t most() { return most_.exchange(now_); }

 private:
  static constexpr std::size_t kFront = 64;
  static std::size_t rounded(std::size_t bytes) { return (bytes + kFront - 1) / kFront * kFront; }
  static Counting& the() {
    static Counting counting;
    return counting;
  }
  static void free(void* data) {
    if (data == nullptr) return;
    char* const block = static_cast<char*>(data) - kFront;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof bytes);
    the().now_ -= bytes;
    std::free(block);
  }
  std::atomic<std::size_t> now_{0}, most_{0};
};

constexpr std::int64_t kWide = 64;  // units of 200 KiB

std::size_t bytes_of(const std::vector<torch::Tensor>& tensors) {
  std::size_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

torch::Tensor inputs() { return torch::ones({1, 4, kWide}); }

// The most that forward and backward need apart from parameters and their gradients.
std::size_t activations(Counting& counting) {
  Transformer plain(kWide);
  for (auto& parameter : plain->parameters()) parameter.set_requires_grad(false);
  const std::size_t before = counting.now();
  counting.most();
  plain->forward(inputs().requires_grad_()).square().mean().backward();
  return counting.most() - before;
}

struct Sizes {
  std::size_t model = 0, unit = 0, root = 0;  // of all parameters, a block's, the root's own
};

Sizes sizes() {
  const Transformer plain(kWide);
  Sizes sizes;
  sizes.model = bytes_of(plain->parameters());
  sizes.unit = bytes_of(plain->blocks[0]->parameters());
  sizes.root = sizes.model - kBlocks * sizes.unit;
  return sizes;
}

void expect_small(ProcessGroup& group, int prefetch) {
  at::set_num_threads(1);
  Counting& counting = Counting::install();
  const Sizes size = sizes();
  const std::size_t computed = activations(counting);
  const std::size_t before = counting.now();
  Transformer model(kWide);
  FullyShardedDataParallel sharded(model, group,
                                   {.prefetch = prefetch, .units = units_of<TransformerBlock>()});
  torch::optim::AdamW optimizer(model->parameters());
  counting.most();
  for (int step = 0; step < 3; ++step) {
    sharded(inputs()).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const std::size_t part = size.model / static_cast<std::size_t>(group.size());
  const std::size_t gathered = (1 + static_cast<std::size_t>(prefetch)) * size.unit;
  const std::size_t reduced = 2 * size.unit;  // gradients under way
  EXPECT_LE(counting.most() - before, 4 * part + gathered + reduced + size.root + computed)
      << "parameters, gradients and two moments of " << part << " bytes each, prefetch "
      << prefetch;
  // The root's rows may not divide.
  EXPECT_LE(counting.now() - before, 3 * (part + size.root)) << "between the steps";
}

TEST(ShardedMemory, OfARankIsItsPartAndAFewUnits) {
  run_ranks(As::Processes, 2, [](ProcessGroup& group) {
    for (const int prefetch : {0, 1, 2}) expect_small(group, prefetch);
  });
  run_ranks(As::Processes, 4, [](ProcessGroup& group) { expect_small(group, /*prefetch=*/1); });
}

}  // namespace
}  // namespace weft::testing
