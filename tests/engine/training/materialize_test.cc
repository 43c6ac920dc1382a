// SPDX-License-Identifier: Apache-2.0
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules.h>
#include <torch/optim/adamw.h>

#include <weft/checkpoint.h>
#include <weft/fully_shard.h>
#include <weft/tests/engine/shard/sharded_models.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

namespace weft::testing {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace nn = torch::nn;

template <class Make>
auto on_meta(const Make& make) {
  const OnMeta guard;
  return make();
}

std::vector<torch::Tensor> tensors_of(const nn::Module& module) {
  auto all = copies(module.parameters());
  for (const auto& buffer : module.buffers()) all.push_back(buffer.clone());
  return all;
}

// A layer that takes its weight from another one.
struct BorrowingImpl : nn::Module {
  explicit BorrowingImpl(const torch::Tensor& lent) : weight(register_parameter("weight", lent)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Borrowing);

// Layers of all kinds, with a weight that two of them share.
struct ManyImpl : nn::Module {
  ManyImpl()
      : words(register_module("words", nn::Embedding(nn::EmbeddingOptions(9, 6).padding_idx(2)))),
        layers(register_module("layers", nn::ModuleList())),
        head(register_module("head", Borrowing(words->weight))) {
    layers->push_back(nn::Linear(6, 5));
    layers->push_back(nn::Bilinear(2, 3, 4));
    layers->push_back(nn::EmbeddingBag(5, 3));
    layers->push_back(nn::Conv1d(2, 4, 3));
    layers->push_back(nn::Conv2d(2, 4, 3));
    layers->push_back(nn::Conv3d(2, 4, 3));
    layers->push_back(nn::ConvTranspose1d(2, 4, 3));
    layers->push_back(nn::ConvTranspose2d(2, 4, 3));
    layers->push_back(nn::ConvTranspose3d(2, 4, 3));
    layers->push_back(nn::BatchNorm1d(4));
    layers->push_back(nn::BatchNorm2d(4));
    layers->push_back(nn::BatchNorm3d(4));
    const auto normed = nn::InstanceNorm1dOptions(4).affine(true).track_running_stats(true);
    layers->push_back(nn::InstanceNorm1d(normed));
    layers->push_back(nn::InstanceNorm2d(normed));
    layers->push_back(nn::InstanceNorm3d(normed));
    layers->push_back(nn::LayerNorm(nn::LayerNormOptions({6})));
    layers->push_back(nn::GroupNorm(2, 4));
    layers->push_back(nn::RNN(3, 4));
    layers->push_back(nn::LSTM(nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true)));
    layers->push_back(nn::GRU(3, 4));
    layers->push_back(nn::RNNCell(3, 4));
    layers->push_back(nn::LSTMCell(3, 4));
    layers->push_back(nn::GRUCell(3, 4));
    layers->push_back(nn::MultiheadAttention(
        nn::MultiheadAttentionOptions(4, 2).add_bias_kv(true).kdim(3).vdim(5)));
    layers->push_back(nn::PReLU(nn::PReLUOptions().num_parameters(3).init(0.5)));
    layers->push_back(
        nn::AdaptiveLogSoftmaxWithLoss(nn::AdaptiveLogSoftmaxWithLossOptions(16, 9, {3, 6})));
    layers->push_back(nn::TransformerEncoderLayer(4, 2));
    layers->push_back(
        nn::Transformer(nn::TransformerOptions(4, 2).num_encoder_layers(1).num_decoder_layers(1)));
  }
  torch::Tensor forward(torch::Tensor x) { return head(words(x)); }
  nn::Embedding words;
  nn::ModuleList layers;
  Borrowing head;
};
TORCH_MODULE(Many);

TEST(Materialize, GivesEveryLayerOfLibtorchValuesOfItsRange) {
  torch::manual_seed(1);  // small layers have few values, whose largest vary much
  const auto usual = Many();
  auto model = on_meta([] { return Many(); });
  for (const auto& parameter : model->parameters()) ASSERT_TRUE(parameter.is_meta());
  materialize(*model, 3);
  const auto expected = tensors_of(*usual);
  const auto values = tensors_of(*model);
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(values[i].is_cpu());
    EXPECT_EQ(values[i].sizes(), expected[i].sizes());
    EXPECT_EQ(values[i].scalar_type(), expected[i].scalar_type());
    if (expected[i].numel() == 0 || !expected[i].is_floating_point()) continue;
    // Constants are the same, and random values about as large.
    const double largest = values[i].abs().max().item<double>();
    const double expected_largest = expected[i].abs().max().item<double>();
    EXPECT_LE(largest, 4 * expected_largest) << i;
    EXPECT_LE(expected_largest, 6 * largest) << i;
    EXPECT_EQ(values[i].numel() == 1 || values[i].std().item<double>() == 0,
              expected[i].numel() == 1 || expected[i].std().item<double>() == 0);
  }
}

TEST(Materialize, ThePaddingRowStaysZeroAndSharedWeightsAreOne) {
  auto model = on_meta([] { return Many(); });
  materialize(*model, 3);
  EXPECT_TRUE(model->head->weight.is_same(model->words->weight));
  EXPECT_TRUE(torch::equal(model->words->weight[2], torch::zeros({6})));
  EXPECT_GT(model->words->weight[1].abs().sum().item<double>(), 0);
}

TEST(Materialize, ValuesDependOnSeedAndNamesOnly) {
  const auto values = [](std::uint64_t seed) {
    auto model = on_meta([] { return Many(); });
    materialize(*model, seed);
    return tensors_of(*model);
  };
  torch::manual_seed(5);
  const auto first = values(3);
  const torch::Tensor drawn = torch::rand({3});
  EXPECT_TRUE(are_equal(first, values(3)));
  EXPECT_FALSE(are_equal(first, values(4)));
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(drawn, torch::rand({3})));
  EXPECT_FALSE(torch::equal(first[1], first[2]));
}

struct NamedImpl : nn::Module {
  NamedImpl()
      : inner(register_module("inner", nn::Linear(4, 4))),
        scale(register_parameter("scale", torch::ones({4}))),
        steps(register_buffer("steps", torch::arange(4))) {}
  torch::Tensor forward(torch::Tensor x) { return inner(x) * scale + steps; }
  nn::Linear inner;
  torch::Tensor scale, steps;
};
TORCH_MODULE(Named);

TEST(Materialize, WhatWouldStayWithoutValuesIsNamedFirst) {
  auto model = on_meta([] { return nn::Sequential(nn::Linear(4, 4), Named()); });
  const Error error = error_of([&] { materialize(*model, 1); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), AllOf(HasSubstr("'1.scale', '1.steps' would stay without values"),
                                  HasSubstr("pass an `init`")));
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
}

TEST(Materialize, AnInitWritesModulesOfItsOwn) {
  auto model = on_meta([] { return nn::Sequential(nn::Linear(4, 4), Named()); });
  const auto init = [](nn::Module& module) {
    if (auto* const linear = module.as<nn::Linear>()) linear->weight.data().fill_(0.25);
    auto* const named = module.as<Named>();
    if (named == nullptr) return;
    torch::nn::init::normal_(named->scale, 3.0, 0.1);
    named->steps.copy_(torch::arange(4));
  };
  materialize(*model, 1, init);
  const auto named = std::dynamic_pointer_cast<NamedImpl>(model->ptr(1));
  EXPECT_TRUE(torch::equal(named->steps, torch::arange(4)));
  EXPECT_NEAR(named->scale.mean().item<double>(), 3.0, 0.5);
  EXPECT_TRUE(torch::equal(named->inner->weight, torch::full({4, 4}, 0.25)));
  EXPECT_GT(named->inner->bias.abs().sum().item<double>(), 0);  // by reset_parameters()
  EXPECT_TRUE(named->scale.requires_grad());
  model->forward(torch::ones({2, 4})).sum().backward();
  EXPECT_TRUE(named->scale.grad().defined());
}

TEST(Materialize, AnInitThatLeavesTensorsIsRefused) {
  auto model = on_meta([] { return Named(); });
  const auto half = [](nn::Module& module) {
    if (auto* const named = module.as<Named>()) named->scale.fill_(1);
  };
  const Error error = error_of([&] { materialize(*model, 1, half); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), AllOf(HasSubstr("'steps' would stay"), Not(HasSubstr("'scale'"))));
  EXPECT_TRUE(model->steps.is_meta());
  EXPECT_TRUE(torch::equal(model->scale, torch::ones({4})));
  model = on_meta([] { return Named(); });
  const auto inside = [](nn::Module& module) {
    if (auto* const named = module.as<Named>()) named->inner->weight.fill_(1);
  };
  EXPECT_THAT(error_of([&] { materialize(*model, 1, inside); }).text(),
              HasSubstr("'inner.weight' of a module inside of it"));
  EXPECT_THROW(materialize(*model, 1, [](nn::Module&) { throw std::runtime_error("own"); }),
               std::runtime_error);
  EXPECT_EQ(model->children().size(), 1U);
  const auto all = [](nn::Module& module) {
    for (auto& parameter : module.parameters()) parameter.add_(1);
    for (auto& buffer : module.buffers()) buffer.fill_(1);
  };
  materialize(*model, 1, all);
  EXPECT_GT(model->inner->weight.min().item<double>(), 0.4);
  EXPECT_LT(model->inner->weight.max().item<double>(), 1.6);
}

struct ViewedImpl : nn::Module {
  ViewedImpl() {
    const torch::Tensor both = torch::empty({2, 3});
    register_buffer("a", both[0]);
    register_buffer("b", both[1]);
  }
};

TEST(Materialize, TensorsThatShareMemoryAreRefused) {
  auto model = on_meta([] { return std::make_shared<ViewedImpl>(); });
  EXPECT_THAT(error_of([&] { materialize(*model, 1); }).text(),
              HasSubstr("'a' and 'b' are views of the same memory"));
}

TEST(Materialize, ValuesThatAreThereStay) {
  auto block = on_meta([] { return Block(); });
  block->up = block->replace_module("up", nn::Linear(8, 20));
  const auto before = copies({block->up->weight, block->up->bias});
  materialize(*block, 1);
  EXPECT_TRUE(are_equal(before, copies({block->up->weight, block->up->bias})));
  EXPECT_TRUE(block->down->weight.is_cpu());
  const auto all = tensors_of(*block);
  materialize(*block, 2);
  EXPECT_TRUE(are_equal(all, tensors_of(*block)));
}

// The bytes that the process has in memory.
std::size_t resident() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0;
  std::size_t here = 0;
  file >> all >> here;
  return here * 4096;
}

TEST(Materialize, ALargeModelOnMetaTakesNoMemory) {
  on_meta([] { return nn::Linear(10, 10); });
  const std::size_t before = resident();
  auto model = on_meta([] {
    return nn::Sequential(nn::Linear(20000, 20000), nn::LSTM(8000, 8000),
                          nn::Embedding(1000000, 512));
  });
  EXPECT_LT(resident() - before, std::size_t{8} << 20);
  EXPECT_GT(model->parameters()[0].numel(), 100000000);
}

struct ModelImpl : nn::Module {
  ModelImpl()
      : words(register_module("words", nn::Embedding(11, 8))),
        body(register_module("body", blocks(3))),
        norm(register_module("norm", nn::BatchNorm1d(8))),
        head(register_module("head", Borrowing(words->weight))) {}
  torch::Tensor forward(torch::Tensor x) { return head(norm(body->forward(words(x)))); }
  nn::Embedding words;
  nn::Sequential body;
  nn::BatchNorm1d norm;
  Borrowing head;
};
TORCH_MODULE(Model);

TEST(MaterializeOnRanks, AnyNumberOfRanksHasTheSameValues) {
  auto plain = on_meta([] { return Model(); });
  materialize(*plain, 7);
  const auto expected = tensors_of(*plain);
  for (const int ranks : {1, 2, 4}) {
    run_ranks(As::Threads, ranks, [&](ProcessGroup& group) {
      for (const bool by_blocks : {false, true}) {
        auto model = on_meta([] { return Model(); });
        FullyShardOptions options;
        if (by_blocks) options.units = units_of<Block>();
        FullyShardedDataParallel sharded(model, group, options);
        for (const auto& shard : model->parameters()) EXPECT_TRUE(shard.is_meta());
        materialize(*model, 7);
        const FullParameters full(*model);
        EXPECT_TRUE(are_equal(tensors_of(*model), expected));
      }
    });
  }
}

// A head whose member is the embedding's weight, while its own stays registered.
struct AssignedImpl : nn::Module {
  AssignedImpl()
      : words(register_module("words", nn::Embedding(11, 8))),
        head(register_module("head", nn::Linear(8, 11))) {
    head->weight = words->weight;
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(words(x)); }
  nn::Embedding words;
  nn::Linear head;
};
TORCH_MODULE(Assigned);

TEST(MaterializeOnRanks, AWeightThatIsAssignedKeepsTheValuesOfItsLayer) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    for (const bool has_init : {false, true}) {
      std::function<void(nn::Module&)> init;
      if (has_init) {
        init = [](nn::Module& module) {
          if (auto* const linear = module.as<nn::Linear>()) linear->weight.fill_(3);
        };
      }
      auto plain = on_meta([] { return Assigned(); });
      materialize(*plain, 7, init);
      EXPECT_TRUE(plain->head->weight.is_same(plain->words->weight));
      EXPECT_GT(plain->head->weight.std().item<double>(), 0.5);  // an embedding's
      auto model = on_meta([] { return Assigned(); });
      FullyShardedDataParallel sharded(model, group);
      materialize(*model, 7, init);
      EXPECT_TRUE(are_equal(whole(*model), copies(plain->parameters())));
      const auto x = torch::arange(4);
      EXPECT_TRUE(torch::equal(sharded(x), plain->forward(x)));
    }
  });
}

TEST(MaterializeOnRanks, AModelOnMetaTrainsAsOneThatIsNot) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto train = [&](auto& wrapped, const auto& parameters) {
      torch::optim::AdamW optimizer(parameters);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const auto words = torch::arange(6) + step + group.rank();
        wrapped(words.remainder(11)).square().mean().backward();
        optimizer.step();
      }
    };
    auto reference = on_meta([] { return Model(); });
    materialize(*reference, 7);
    DistributedDataParallel ddp(reference, group);
    train(ddp, reference->parameters());
    auto model = on_meta([] { return Model(); });
    FullyShardedDataParallel sharded(model, group, {.param_dtype = torch::kFloat});
    const auto shards = model->parameters();
    materialize(*model, 7);
    EXPECT_TRUE(shards[0].is_same(model->parameters()[0]));
    train(sharded, shards);
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters())));
  });
}

TEST(MaterializeOnRanks, UnitsMayBeShardedWhileTheModelIsBuilt) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto build = [&](bool shards) {
      const OnMeta guard;
      nn::Sequential net;
      for (int i = 0; i < 3; ++i) {
        Block block;
        net->push_back(shards ? fully_shard(block, group) : block);
      }
      return net;
    };
    auto model = build(true);
    materialize(*model, 7);  // before the root is wrapped
    FullyShardedDataParallel sharded(model, group);
    auto plain = build(false);
    materialize(*plain, 7);
    EXPECT_TRUE(are_equal(whole(*model), copies(plain->parameters())));
  });
}

TEST(MaterializeOnRanks, ValuesAreMadeInTheParametersOwnDtype) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto plain = on_meta([] { return blocks(2); });
    materialize(*plain, 7);
    auto model = on_meta([] { return blocks(2); });
    FullyShardedDataParallel sharded(model, group, {.param_dtype = torch::kBFloat16});
    materialize(*model, 7);
    EXPECT_EQ(sharded(torch::ones({2, 8})).scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(are_equal(whole(*model), copies(plain->parameters())));
  });
}

TEST(MaterializeOnRanks, AnInitSeesWholeParameters) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto init = [](nn::Module& module) {
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        EXPECT_TRUE(parameter.size(0) == 8 || parameter.size(0) == 20);
        parameter.normal_();
      }
    };
    auto plain = on_meta([] { return blocks(2); });
    materialize(*plain, 7, init);
    auto model = on_meta([] { return blocks(2); });
    FullyShardedDataParallel sharded(model, group);
    materialize(*model, 7, init);
    EXPECT_TRUE(are_equal(whole(*model), copies(plain->parameters())));
  });
}

TEST(MaterializeOnRanks, AFailedInitLeavesTheModelOnMeta) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = on_meta([] { return Named(); });
    FullyShardedDataParallel sharded(model, group);
    EXPECT_THAT(error_of([&] { materialize(*model, 7); }).text(), HasSubstr("'scale', 'steps'"));
    EXPECT_THROW(materialize(*model, 1, [](nn::Module&) { throw std::runtime_error("own"); }),
                 std::runtime_error);
    for (const auto& shard : model->parameters()) EXPECT_TRUE(shard.is_meta());
    materialize(*model, 7, [](nn::Module& module) {
      for (auto& parameter : module.parameters()) parameter.fill_(2);
      for (auto& buffer : module.buffers()) buffer.fill_(0);
    });
    EXPECT_TRUE(torch::equal(sharded(torch::ones({1, 4})), torch::full({1, 4}, 20.0)));
  });
}

TEST(MaterializeOnRanks, UseBeforeItIsRefused) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = on_meta([] { return blocks(2); });
    FullyShardedDataParallel sharded(model, group);
    const std::function<void()> uses[] = {[&] {
                                            sharded(torch::ones({1, 8}));
                                          },
                                          [&] { const FullParameters full(*model); }};
    for (const auto& use : uses) {
      const Error error = error_of(use);
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), AllOf(HasSubstr("'0.up.weight' has no values yet"),
                                      HasSubstr("weft::materialize(model, seed)")));
    }
    materialize(*model, 1);
    sharded(torch::ones({1, 8})).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST(MaterializeOnRanks, DistributedDataParallelRefusesAModelOnMeta) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    auto model = on_meta([] { return blocks(2); });
    const Error error = error_of([&] { DistributedDataParallel ddp(model, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("weft::materialize(model, seed) first"));
  });
}

TEST(MaterializeOnRanks, ACheckpointIsLoadedAfterIt) {
  const harness::Folder folder;
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto saved = blocks(2);
    fill_values(*saved);
    const std::string file = folder.path() + "/model.pt";
    checkpoint::save(file, group, {{"model", saved}});
    auto plain = on_meta([] { return blocks(2); });
    auto model = on_meta([] { return blocks(2); });
    FullyShardedDataParallel sharded(model, group);
    for (auto module : {plain, model}) {
      const Error error = error_of([&] { checkpoint::load(file, group, {{"model", module}}); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("weft::materialize"));
      materialize(*module, 1);
      checkpoint::load(file, group, {{"model", module}});
      EXPECT_TRUE(are_equal(whole(*module), copies(saved->parameters())));
    }
  });
}

TEST(MaterializeOnRanks, TheGuardMayLiveMeanwhile) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    std::optional<OnMeta> guard(std::in_place);
    auto model = blocks(2);
    FullyShardedDataParallel sharded(model, group);
    materialize(*model, 7);
    guard.reset();
    EXPECT_TRUE(sharded(torch::ones({1, 8})).is_cpu());
  });
}

TEST(MaterializeOnRanks, AModelOfWhichAPartIsOnMetaIsRefused) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    nn::Sequential model(nn::Linear(4, 4), on_meta([] { return nn::Linear(4, 4); }));
    const Error error = error_of([&] { FullyShardedDataParallel sharded(model, group); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("call weft::materialize(model, seed) before"));
  });
}

}  // namespace
}  // namespace weft::testing
