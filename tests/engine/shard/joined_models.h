// SPDX-License-Identifier: Apache-2.0
// What the tests of joins of sharded models train, and how.
#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <weft/training.h>

#include "sharded_models.h"

namespace weft::testing::joined {

inline torch::Tensor inputs(int step, int rank) {
  return numbers({4, 8}, static_cast<std::uint64_t>(100 * step + rank));
}

// Trains with a learning rate that falls, clips, and steps every `every`th time.
template <class Wrapped>
void train(Wrapped& wrapped, torch::nn::Module& model, torch::optim::Optimizer& optimizer, int rank,
           int steps, int every = 1) {
  for (int step = 0; step < steps; ++step) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (step + 1));
    {
      const auto quiet = wrapped.no_sync((step + 1) % every != 0);
      wrapped(inputs(step, rank)).square().mean().backward();
    }
    if ((step + 1) % every != 0) continue;
    clip_grad_norm_(model, 0.05);
    optimizer.step();
    optimizer.zero_grad();
  }
}

inline void expect_close(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_LE((a[i] - b[i]).norm().item<double>(), 1e-5 * b[i].norm().item<double>()) << i;
}

}  // namespace weft::testing::joined
