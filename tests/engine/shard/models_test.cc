// SPDX-License-Identifier: Apache-2.0
// Models of all kinds, unmodified, train as with DistributedDataParallel.
#include <gtest/gtest.h>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adamw.h>

#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

// Trains both copies for some steps, by SGD with momentum and by AdamW, and compares all bits.
template <class Make>
void expect_bits_of_ddp(const Make& make, FullyShardOptions options = {},
                        at::IntArrayRef input = {4, 8}, DdpOptions ddp_options = {}) {
  const std::vector<std::int64_t> shape = input.vec();
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    for (const bool is_adamw : {false, true}) {
      const auto train = [&](auto& wrapped, auto& model) {
        std::unique_ptr<torch::optim::Optimizer> optimizer;
        if (is_adamw)
          optimizer = std::make_unique<torch::optim::AdamW>(model->parameters());
        else
          optimizer = std::make_unique<torch::optim::SGD>(
              model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          optimizer->zero_grad();
          const auto seed = static_cast<std::uint64_t>(100 * step + group.rank());
          wrapped(numbers(shape, seed)).square().mean().backward();
          optimizer->step();
        }
      };
      auto reference = make();
      fill_values(*reference);
      DistributedDataParallel ddp(reference, group, ddp_options);
      train(ddp, reference);
      auto model = make();
      fill_values(*model, group.rank() == 0 ? 1 : 2);  // rank 0's values count
      FullyShardedDataParallel sharded(model, group, options);
      train(sharded, model);
      EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
    }
  });
}

struct SequenceImpl : nn::Module {
  SequenceImpl()
      : front(register_module(
            "front", nn::Sequential(nn::Linear(7, 12), nn::LayerNorm(nn::LayerNormOptions({12}))))),
        lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(12, 5).num_layers(2)))),
        attention(register_module("attention", nn::MultiheadAttention(5, 1))),
        head(register_module("head", nn::Linear(5, 3))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = std::get<0>(lstm(front->forward(x)));
    x = std::get<0>(attention(x, x, x));
    return head(x);
  }
  nn::Sequential front;
  nn::LSTM lstm;
  nn::MultiheadAttention attention;
  nn::Linear head;
};
TORCH_MODULE(Sequence);

TEST(ShardedModels, LstmAndAttentionTrainUnmodified) {
  expect_bits_of_ddp([] { return Sequence(); }, {}, {6, 2, 7});
}

struct ImageImpl : nn::Module {
  ImageImpl()
      : conv(register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 5, 3)))),
        norm(register_module("norm", nn::BatchNorm2d(5))),
        head(register_module("head", nn::Linear(5, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return head(torch::relu(norm(conv(x))).mean({2, 3}));
  }
  nn::Conv2d conv;
  nn::BatchNorm2d norm;
  nn::Linear head;
};
TORCH_MODULE(Image);

TEST(ShardedModels, ConvolutionsAndBatchNormTrainUnmodified) {
  expect_bits_of_ddp([] { return Image(); }, {}, {4, 3, 6, 6});
}

TEST(ShardedModels, ChannelsLastParametersKeepTheirStrides) {
  const auto make = [] {
    Image image;
    image->conv->weight.set_data(image->conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    return image;
  };
  expect_bits_of_ddp(make, {}, {4, 3, 6, 6});
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto image = make();
    FullyShardedDataParallel sharded(image, group);
    EXPECT_TRUE(image->conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  });
}

struct TransposedImpl : nn::Module {
  TransposedImpl() : weight(register_parameter("weight", torch::ones({8, 6}).t())) {}
  torch::Tensor forward(const torch::Tensor& x) { return x.matmul(weight.t()); }
  torch::Tensor weight;
};
TORCH_MODULE(Transposed);

TEST(ShardedModels, ATransposedParameterBecomesContiguous) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    Transposed model;
    FullyShardedDataParallel sharded(model, group);
    sharded(torch::ones({2, 8})).sum().backward();
    EXPECT_TRUE(torch::equal(model->parameters()[0].grad(), torch::full({3, 8}, 2.0)));
  });
}

// A layer that takes its weight from another one.
struct BorrowerImpl : nn::Module {
  explicit BorrowerImpl(const torch::Tensor& lent) : weight(register_parameter("weight", lent)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Borrower);

struct TiedImpl : nn::Module {
  TiedImpl()
      : inner(register_module("inner", nn::Linear(8, 8))),
        between(register_module("between", Block())),
        again(register_module("again", Borrower(inner->weight))),
        scale(register_parameter("scale", torch::tensor(1.5))) {}
  torch::Tensor forward(torch::Tensor x) { return again(between(torch::tanh(inner(x)))) * scale; }
  nn::Linear inner;
  Block between;
  Borrower again;
  torch::Tensor scale;
};
TORCH_MODULE(Tied);

TEST(ShardedModels, AWeightThatUnitsShareBelongsToTheRoot) {
  expect_bits_of_ddp([] { return Tied(); });
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    Tied model;
    FullyShardedDataParallel sharded(model, group);
    EXPECT_TRUE(model->inner->named_parameters()["weight"].is_same(
        model->again->named_parameters()["weight"]));
    const auto unit = [](const torch::Tensor& shard) {
      return shard::owner_of(shard).unit->name();
    };
    EXPECT_EQ(unit(model->inner->named_parameters()["weight"]), "");
    EXPECT_EQ(unit(model->inner->named_parameters()["bias"]), "inner");
    EXPECT_EQ(unit(model->between->named_parameters()["up.weight"]), "between");
  });
}

TEST(ShardedModels, AWeightThatOneUnitSharesHasOneShard) {
  const auto all = [](const std::string&, const nn::Module&) { return false; };
  expect_bits_of_ddp([] { return Tied(); }, {.units = all});
}

TEST(ShardedModels, UnitsMayLieInUnits) {
  const auto every = [](const std::string& name, const nn::Module&) {
    return name == "1" || name == "1.up" || name == "1.down" || name == "2.up";
  };
  expect_bits_of_ddp([] { return blocks(3); }, {.units = every});
  expect_bits_of_ddp([] { return blocks(3); }, {.units = units_of<Block>()});
}

TEST(ShardedModels, OptionsDoNotChangeTheBits) {
  for (const bool reshards : {true, false}) {
    for (const int prefetch : {0, 1, 3}) {
      expect_bits_of_ddp([] { return blocks(3); },
                         {.reshard_after_forward = reshards, .prefetch = prefetch});
    }
  }
}

TEST(ShardedModels, RowsThatDoNotDivideAreSpread) {
  expect_bits_of_ddp(
      [] { return nn::Sequential(nn::Linear(8, 1), nn::Linear(1, 5), nn::Linear(5, 3)); });
}

TEST(ShardedModels, FrozenParametersStayAndOthersTrain) {
  const auto make = [] {
    auto net = blocks(3);
    for (auto& parameter : net->ptr(1)->parameters()) parameter.set_requires_grad(false);
    net->ptr(2)->named_parameters()["up.bias"].set_requires_grad(false);
    return net;
  };
  expect_bits_of_ddp(make);
}

// The same model called twice before one backward.
TEST(ShardedModels, TwoForwardsBeforeABackwardAddTheirGradients) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto gradients = [&](auto& wrapped, auto& model) {
      const auto a = wrapped(numbers({4, 8}, 1 + static_cast<std::uint64_t>(group.rank())));
      const auto b = wrapped(numbers({4, 8}, 7 + static_cast<std::uint64_t>(group.rank())));
      (a * b).mean().backward();
      torch::optim::SGD(model->parameters(), 0.5).step();
    };
    auto reference = blocks(3);
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group, {.static_graph = true});
    gradients(ddp, reference);
    auto model = blocks(3);
    fill_values(*model);
    FullyShardedDataParallel sharded(model, group);
    gradients(sharded, model);
    const auto mine = whole(*model);
    for (std::size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(torch::allclose(mine[i], reference->parameters()[i], 1e-6, 1e-7));
  });
}

}  // namespace
}  // namespace weft::testing
