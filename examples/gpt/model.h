// SPDX-License-Identifier: Apache-2.0
// The model, written as for one device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/fully_shard.h>

namespace gpt {

using torch::Tensor;

struct Shape {
  std::int64_t layers = 4, heads = 4, width = 64, context = 64;
  bool recompute = false;  // compute each block again in backward
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        before_attention(register_module("before_attention", norm(width))),
        to_heads(register_module("to_heads", torch::nn::Linear(width, 3 * width))),
        from_heads(register_module("from_heads", torch::nn::Linear(width, width))),
        before_mlp(register_module("before_mlp", norm(width))),
        expand(register_module("expand", torch::nn::Linear(width, 4 * width))),
        contract(register_module("contract", torch::nn::Linear(4 * width, width))) {}

  static torch::nn::LayerNorm norm(std::int64_t width) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
  }
  // [examples, characters, width] -> the same shape
  Tensor forward(Tensor x) {
    const auto split = to_heads(before_attention(x)).chunk(3, -1);
    const auto by_head = [&](const Tensor& one) {
      return one.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    const Tensor attended = torch::scaled_dot_product_attention(
        by_head(split[0]), by_head(split[1]), by_head(split[2]), {}, 0.0, /*is_causal=*/true);
    x = x + from_heads(attended.transpose(1, 2).flatten(2));
    return x + contract(torch::gelu(expand(before_mlp(x))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm before_attention;
  torch::nn::Linear to_heads, from_heads;
  torch::nn::LayerNorm before_mlp;
  torch::nn::Linear expand, contract;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl(std::int64_t characters, const Shape& shape)
      : recompute(shape.recompute),
        character(register_module("character", torch::nn::Embedding(characters, shape.width))),
        position(register_module("position", torch::nn::Embedding(shape.context, shape.width))),
        last(register_module("last", BlockImpl::norm(shape.width))),
        head(register_module("head", torch::nn::Linear(shape.width, characters))) {
    for (std::int64_t i = 0; i < shape.layers; ++i)
      blocks.push_back(
          register_module("block" + std::to_string(i), Block(shape.width, shape.heads)));
  }

  // int64 [examples, characters] -> scores of the next character [examples, characters, known ones]
  Tensor forward(Tensor text) {
    Tensor x = character(text) + position(torch::arange(text.size(1), text.options()));
    for (Block& block : blocks) x = recompute ? weft::checkpointed(block, x) : block(x);
    return head(last(x)).to(torch::kFloat);
  }

  bool recompute;
  torch::nn::Embedding character, position;
  std::vector<Block> blocks;
  torch::nn::LayerNorm last;
  torch::nn::Linear head;
};
TORCH_MODULE(Gpt);

}  // namespace gpt
