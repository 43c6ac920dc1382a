// SPDX-License-Identifier: Apache-2.0
// Compares a batch norm over ranks with one process that has the batches of all ranks.
#pragma once

#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"

namespace weft::testing {

struct BatchNormCase {
  std::vector<std::int64_t> rows = {3, 2};  // of the batch, by rank
  std::vector<std::int64_t> shape = {4};    // of one row; its first dimension are the channels
  torch::nn::BatchNormOptions options{4};
  int steps = 3;
};

// Forward of one rank's layer, and the layer's tensors.
struct BatchNormUnderTest {
  std::function<torch::Tensor(torch::Tensor)> forward;
  std::shared_ptr<torch::nn::Module> module;
};
// Makes the layer of one rank: all numbers are those of a new layer.
using MakeLayer =
    std::function<BatchNormUnderTest(const torch::nn::BatchNormOptions&, ProcessGroup)>;

inline std::vector<std::int64_t> with_rows(std::int64_t rows, const BatchNormCase& item) {
  std::vector<std::int64_t> shape{rows};
  shape.insert(shape.end(), item.shape.begin(), item.shape.end());
  return shape;
}

// Sums gradients of parameters over the ranks, as the sum of the ranks' losses has them.
inline void expect_equal_parameters(const torch::nn::Module& mine, const torch::nn::Module& whole,
                                    ProcessGroup group) {
  const auto here = mine.named_parameters(), there = whole.named_parameters();
  for (const auto& item : here) {
    auto gradient = item.value().grad().clone();
    group.all_reduce(gradient).wait();
    EXPECT_TRUE(torch::allclose(gradient, there[item.key()].grad(), 1e-9, 1e-12)) << item.key();
  }
  const auto buffers = mine.named_buffers(), others = whole.named_buffers();
  for (const auto& item : buffers) {
    if (!item.value().defined()) continue;
    EXPECT_TRUE(torch::allclose(item.value(), others[item.key()], 1e-9, 1e-12)) << item.key();
  }
}

// A layer of libtorch's in double precision, for the whole batch.
template <class Plain>
void expect_as_one_process(const BatchNormCase& item, const MakeLayer& make) {
  const auto ranks = static_cast<int>(item.rows.size());
  harness::run_ranks(harness::As::Threads, ranks, [&](ProcessGroup group) {
    Plain whole(item.options);
    whole->to(torch::kDouble);
    BatchNormUnderTest mine = make(item.options, group);
    mine.module->to(torch::kDouble);
    const auto index = static_cast<std::size_t>(group.rank());
    std::int64_t first = 0, all = 0;
    for (std::size_t r = 0; r < item.rows.size(); ++r) {
      if (r < index) first += item.rows[r];
      all += item.rows[r];
    }
    for (int step = 0; step < item.steps; ++step) {
      const auto seed = static_cast<std::uint64_t>(10 * step);
      const auto batch = random(with_rows(all, item), seed) * 3 + 2;
      const auto factors = random(with_rows(all, item), seed + 1);
      auto input = batch.clone().requires_grad_();
      auto own = batch.narrow(0, first, item.rows[index]).clone().requires_grad_();
      whole->zero_grad();
      mine.module->zero_grad();
      const auto expected = whole(input);
      const auto output = mine.forward(own);
      EXPECT_TRUE(torch::allclose(output, expected.narrow(0, first, item.rows[index]), 1e-9, 1e-9));
      (expected * factors).sum().backward();
      (output * factors.narrow(0, first, item.rows[index])).sum().backward();
      EXPECT_TRUE(
          torch::allclose(own.grad(), input.grad().narrow(0, first, item.rows[index]), 1e-9, 1e-9));
      expect_equal_parameters(*mine.module, *whole, group);
    }
    whole->eval();
    mine.module->eval();
    if (group.rank() == 0 && item.rows[0] > 1) {  // alone
      const auto batch = random(with_rows(item.rows[0], item), 99);
      EXPECT_TRUE(torch::allclose(mine.forward(batch), whole(batch), 1e-9, 1e-9));
    }
  });
}

}  // namespace weft::testing
