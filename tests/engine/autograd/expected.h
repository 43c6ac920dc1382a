// SPDX-License-Identifier: Apache-2.0
// Expected gradients of passes, by libtorch alone.
#pragma once

#include <functional>
#include <vector>

#include <torch/autograd.h>

#include <weft/tests/engine/autograd/settings.h>

namespace weft::harness {

// Returns the gradients of the sum of compute()'s result, by libtorch alone.
inline std::vector<at::Tensor> local_gradients(const std::function<at::Tensor()>& compute,
                                               const std::vector<at::Tensor>& leaves) {
  return torch::autograd::grad({compute().sum()}, leaves, {}, std::nullopt, false,
                               /*allow_unused=*/true);
}

inline void expect_gradients(AutogradContext& context, const std::vector<at::Tensor>& leaves,
                             const std::vector<at::Tensor>& expected) {
  std::size_t defined = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor gradient = context.gradient(leaves[i]);
    ASSERT_EQ(gradient.defined(), expected[i].defined()) << i;
    if (!gradient.defined()) continue;
    ++defined;
    EXPECT_TRUE(at::allclose(gradient, expected[i], 1e-10, 1e-10)) << i << gradient << expected[i];
    EXPECT_FALSE(leaves[i].grad().defined());
  }
  EXPECT_EQ(context.gradients().size(), defined);
}

}  // namespace weft::harness
