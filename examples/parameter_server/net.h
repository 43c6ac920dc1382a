// SPDX-License-Identifier: Apache-2.0
// The network that is trained, and each trainer's data.
#pragma once

#include <torch/torch.h>

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 32));
    output = register_module("output", torch::nn::Linear(32, 1));
  }
  at::Tensor forward(at::Tensor x) { return output(torch::tanh(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Net);

struct Examples {
  at::Tensor x, y;
};

// Points of a square, and the products of their coordinates; each trainer gets different points.
inline Examples examples_of(int trainer) {
  torch::manual_seed(static_cast<std::uint64_t>(trainer));
  const auto x = torch::rand({128, 2}) * 2 - 1;
  return {x, (x.select(1, 0) * x.select(1, 1)).unsqueeze(1)};
}
