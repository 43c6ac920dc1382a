// SPDX-License-Identifier: Apache-2.0
// Small models for the tests, in double precision so that sums can be compared closely.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

namespace weft::testing {

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t in = 6, std::int64_t hidden = 5, std::int64_t out = 3)
      : first(register_module("first", torch::nn::Linear(in, hidden))),
        second(register_module("second", torch::nn::Linear(hidden, hidden))),
        third(register_module("third", torch::nn::Linear(hidden, out))) {
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(first(x));
    x = torch::tanh(second(x));
    return third(x);
  }
  torch::nn::Linear first, second, third;
};
TORCH_MODULE(Mlp);

// A chain of `layers` scalar weights.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int layers) {
    for (int i = 0; i < layers; ++i)
      weights.push_back(
          register_parameter("w" + std::to_string(i), torch::ones({1}, torch::kDouble)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& weight : weights) x = x * weight;
    return x;
  }
  std::vector<torch::Tensor> weights;
};

// Uses weight i where used[i] says so.
struct PickyImpl : torch::nn::Module {
  PickyImpl() {
    for (int i = 0; i < 3; ++i)
      weights.push_back(
          register_parameter("w" + std::to_string(i), torch::ones({2}, torch::kDouble)));
  }
  torch::Tensor forward(const std::vector<bool>& used, double x) {
    torch::Tensor sum = torch::zeros({2}, torch::kDouble);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (used[i]) sum = sum + weights[i] * x;
    }
    return sum;
  }
  std::vector<torch::Tensor> weights;
};

// Gives a module the same parameters on every call with the same seed. (The ranks of a process
// share libtorch's generator.)
template <class Holder>
void fill(Holder& module, std::uint64_t seed = 1) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& parameter : module->parameters())
    parameter.copy_(torch::randn(parameter.sizes(), generator, parameter.options()));
}

inline torch::Tensor random(torch::IntArrayRef shape, std::uint64_t seed) {
  return torch::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kDouble);
}

// The part of a batch that a rank sees.
inline torch::Tensor part(const torch::Tensor& batch, int rank, int ranks) {
  return batch.chunk(ranks)[static_cast<std::size_t>(rank)].contiguous();
}

// The largest relative difference between two sets of tensors.
inline double difference(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  double largest = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].defined() != b[i].defined()) return 1;
    if (!a[i].defined()) continue;
    const auto scale = std::max(1e-300, b[i].abs().max().item<double>());
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>() / scale);
  }
  return largest;
}

inline std::vector<torch::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : module.parameters())
    all.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return all;
}

}  // namespace weft::testing
