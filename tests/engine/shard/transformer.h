// SPDX-License-Identifier: Apache-2.0
// A transformer of eight blocks, for the tests of what a sharded model computes, keeps in memory
// and overlaps.
#pragma once

#include <cstdint>

#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/modules/normalization.h>

#include "sharded_models.h"

namespace weft::testing {

inline constexpr int kBlocks = 8;
inline constexpr std::int64_t kHeads = 2;

struct TransformerBlockImpl : torch::nn::Module {
  explicit TransformerBlockImpl(std::int64_t width)
      : norm1(norm("norm1", width)),
        norm2(norm("norm2", width)),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = qkv(norm1(x))
                           .view({x.size(0), x.size(1), 3, kHeads, x.size(2) / kHeads})
                           .permute({2, 0, 3, 1, 4});
    const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    x = x + out(y.transpose(1, 2).reshape(x.sizes()));
    return x + down(at::gelu(up(norm2(x))));
  }
  torch::nn::LayerNorm norm(const char* name, std::int64_t width) {
    return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, out, up, down;
};
TORCH_MODULE(TransformerBlock);

// The root's own parameters are those of the norm and the head.
struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(std::int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        head(register_module("head", torch::nn::Linear(width, 3))) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), TransformerBlock(width)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (TransformerBlock& block : blocks) x = block(x);
    return head(norm(x));
  }
  std::vector<TransformerBlock> blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Transformer);

}  // namespace weft::testing
