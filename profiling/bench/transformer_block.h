// SPDX-License-Identifier: Apache-2.0
// A transformer block with heads of 64, for benches of models made of such blocks.
#pragma once

#include <torch/torch.h>

namespace weft::bench {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width)
      : norm1(register_module("norm1", Norm(NormOptions({width})))),
        norm2(register_module("norm2", Norm(NormOptions({width})))),
        qkv(register_module("qkv", Linear(width, 3 * width))),
        out(register_module("out", Linear(width, width))),
        up(register_module("up", Linear(width, 4 * width))),
        down(register_module("down", Linear(4 * width, width))) {}
  // `x`: texts, tokens, width.
  torch::Tensor forward(torch::Tensor x) {
    const auto parts =
        qkv(norm1(x)).view({x.size(0), x.size(1), 3, x.size(2) / 64, 64}).permute({2, 0, 3, 1, 4});
    const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    x = x + out(y.transpose(1, 2).reshape(x.sizes()));
    return x + down(torch::gelu(up(norm2(x))));
  }

  using Norm = torch::nn::LayerNorm;
  using NormOptions = torch::nn::LayerNormOptions;
  using Linear = torch::nn::Linear;
  Norm norm1, norm2;
  Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

}  // namespace weft::bench
