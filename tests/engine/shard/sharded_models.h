// SPDX-License-Identifier: Apache-2.0
// Small models for the tests of sharding, and the comparison with DistributedDataParallel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <weft/fully_shard.h>
#include <weft/parallel.h>

namespace weft::testing {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width = 8, std::int64_t hidden = 20)
      : up(register_module("up", torch::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {}
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::tanh(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

inline torch::nn::Sequential blocks(int count, std::int64_t width = 8, std::int64_t hidden = 20) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) net->push_back(Block(width, hidden));
  return net;
}

// Forwards may leave out a unit, or use a part of it.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl()
      : a(register_module("a", Block())),
        b(register_module("b", Block())),
        c(register_module("c", Block())) {}
  // `part`: b's second layer alone.
  torch::Tensor forward(torch::Tensor x, bool uses_b, bool part = false) {
    x = a(x);
    if (uses_b) x = part ? torch::linear(x, b->down->weight.t()) : b(x);
    return part ? x.sum() : c(x).sum();
  }
  Block a, b, c;
};

// Gives the parameters the same values at every call. (Ranks that are threads share libtorch's
// generator.)
inline void fill_values(torch::nn::Module& module, std::uint64_t seed = 1) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& parameter : module.parameters())
    parameter.copy_(torch::randn(parameter.sizes(), generator, torch::kFloat) * 0.2);
}

inline torch::Tensor numbers(at::IntArrayRef shape, std::uint64_t seed) {
  return torch::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kFloat);
}

inline std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.detach().clone());
  return all;
}

// The whole parameters of a sharded module.
inline std::vector<torch::Tensor> whole(torch::nn::Module& module) {
  const FullParameters full(module);
  return copies(module.parameters());
}

// True if all bits are equal.
inline bool are_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace weft::testing
