// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules.h>
#include <torch/optim/adamw.h>

#include <weft/fully_shard.h>
#include <weft/tests/engine/shard/sharded_models.h>
#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

namespace weft::testing {
namespace {

using harness::error_of;
using ::testing::HasSubstr;
namespace nn = torch::nn;

struct DropoutBlockImpl : nn::Module {
  DropoutBlockImpl()
      : up(register_module("up", nn::Linear(8, 20))),
        dropout(register_module("dropout", nn::Dropout(0.3))),
        down(register_module("down", nn::Linear(20, 8))) {}
  torch::Tensor forward(torch::Tensor x) {
    ++calls;
    return x + down(dropout(torch::tanh(up(x))));
  }
  nn::Linear up;
  nn::Dropout dropout;
  nn::Linear down;
  int calls = 0;
};
TORCH_MODULE(DropoutBlock);

std::vector<torch::Tensor> gradients_of(const nn::Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(parameter.grad().clone());
  return all;
}

// Runs forward and backward from the same random state and returns all gradients.
template <class Forward>
std::vector<torch::Tensor> gradients(nn::Module& module, const Forward& forward) {
  module.zero_grad();
  torch::manual_seed(9);
  auto x = numbers({4, 8}, 3).requires_grad_();
  auto loss = forward(x).square().mean();
  loss.backward();
  auto all = gradients_of(module);
  all.push_back(x.grad().clone());
  all.push_back(loss.detach());
  all.push_back(torch::rand({2}));  // the generator has the same state afterwards
  return all;
}

TEST(Checkpointed, GradientsHaveTheSameBitsWithDropout) {
  DropoutBlock block;
  const auto usual = gradients(*block, [&](auto x) { return block(x); });
  EXPECT_EQ(block->calls, 1);
  EXPECT_TRUE(are_equal(usual, gradients(*block, [&](auto x) { return checkpointed(block, x); })));
  EXPECT_EQ(block->calls, 3);
}

TEST(Checkpointed, TakesHoldersPointersReferencesAndSequentials) {
  DropoutBlock block;
  nn::Sequential net(block, nn::Tanh());
  const auto usual = gradients(*net, [&](auto x) { return net->forward(x); });
  const std::shared_ptr<DropoutBlockImpl> pointer = block.ptr();
  const std::function<torch::Tensor(torch::Tensor)> forwards[] = {
      [&](torch::Tensor x) { return checkpointed(net, x); },
      [&](torch::Tensor x) { return checkpointed(net.ptr(), x); },
      [&](torch::Tensor x) { return torch::tanh(checkpointed(pointer, x)); },
      [&](torch::Tensor x) { return torch::tanh(checkpointed(*block, x)); },
      [&](torch::Tensor x) { return torch::tanh(checkpointed(block.get(), x)); },
      [&](torch::Tensor x) { return torch::tanh(checkpointed(DropoutBlock(block), x)); }};
  for (const auto& forward : forwards) EXPECT_TRUE(are_equal(usual, gradients(*net, forward)));
}

struct MixedImpl : nn::Module {
  MixedImpl() : weight(register_parameter("weight", numbers({8}, 1))) {}
  std::tuple<torch::Tensor, std::vector<torch::Tensor>, torch::Tensor> forward(
      const std::vector<torch::Tensor>& parts, double factor, const std::string& mode,
      std::optional<torch::Tensor> mask = std::nullopt) {
    torch::Tensor sum = parts[0] * weight + parts[1] * factor;
    if (mask) sum = sum * *mask;
    return {mode == "abs" ? sum.abs() : sum, {sum.argmax(1), sum * 2}, torch::Tensor()};
  }
  torch::Tensor weight;
};
TORCH_MODULE(Mixed);

TEST(Checkpointed, TakesAndReturnsValuesAndNestedTensors) {
  Mixed mixed;
  const auto run = [&](auto call) {
    mixed->zero_grad();
    auto a = numbers({4, 8}, 1).requires_grad_();
    auto b = numbers({4, 8}, 2).requires_grad_();
    auto mask = numbers({8}, 3).requires_grad_();
    const auto [first, others, none] = call(std::vector<torch::Tensor>{a, b * 1}, mask);
    EXPECT_FALSE(none.defined());
    EXPECT_FALSE(others[0].requires_grad());
    (first.sum() + others[1].square().sum()).backward();
    return std::vector<torch::Tensor>{a.grad(), b.grad(), mask.grad(), mixed->weight.grad().clone(),
                                      others[0]};
  };
  const auto usual = run([&](auto parts, auto mask) { return mixed(parts, 0.5, "abs", mask); });
  EXPECT_TRUE(are_equal(usual, run([&](auto parts, auto mask) {
                          return checkpointed(mixed, parts, 0.5, "abs",
                                              std::optional<torch::Tensor>(mask));
                        })));
}

struct ViewingImpl : nn::Module {
  ViewingImpl() : weight(register_parameter("weight", numbers({8}, 1))) {}
  torch::Tensor forward(at::TensorList parts, at::OptionalIntArrayRef shape, std::string_view mode,
                        const char* order, const nn::Module* other) {
    EXPECT_NE(other, nullptr);
    const auto sum = (parts[0] * weight + parts[1]).view(shape.value());
    return mode == "abs" && std::string_view(order) == "last" ? sum.abs() : sum;
  }
  torch::Tensor weight;
};

TEST(Checkpointed, ForwardMayTakeViewsOfKeptArguments) {
  const auto viewing = std::make_shared<ViewingImpl>();
  const auto run = [&](auto call) {
    viewing->zero_grad();
    auto a = numbers({4, 8}, 1).requires_grad_();
    auto parts = std::make_unique<std::vector<torch::Tensor>>(2, a);
    std::vector<std::int64_t> shape{8, 4};
    std::string mode = "abs";
    const auto y = call(*parts, shape, mode);
    EXPECT_TRUE((*parts)[1].is_same(a));  // the caller's tensors stay
    parts.reset();
    shape = {2, 2};
    mode = "sum";
    y.square().sum().backward();
    return std::vector<torch::Tensor>{y.detach(), a.grad(), viewing->weight.grad().clone()};
  };
  const auto usual = run([&](auto& parts, auto& shape, auto& mode) {
    return viewing->forward(parts, shape, mode, "last", viewing.get());
  });
  EXPECT_TRUE(are_equal(usual, run([&](auto& parts, auto& shape, auto& mode) {
                          return checkpointed(viewing, parts, shape, mode, "last", viewing.get());
                        })));
}

struct NoArgumentsImpl : nn::Module {
  torch::Tensor forward() { return torch::tanh(weight); }
  torch::Tensor weight = register_parameter("weight", numbers({4}, 1));
};

TEST(Checkpointed, AModuleMayTakeNoArguments) {
  const auto module = std::make_shared<NoArgumentsImpl>();
  const auto y = checkpointed(module);
  y.sum().backward();
  EXPECT_TRUE(torch::allclose(module->weight.grad(), 1 - y * y));
}

TEST(Checkpointed, AnLstmReturnsItsStates) {
  nn::LSTM lstm(nn::LSTMOptions(8, 5).num_layers(2).dropout(0.3));
  const auto last = [](const auto& output) {
    return std::get<0>(output) + std::get<0>(std::get<1>(output)).sum();
  };
  const auto forward = [&](torch::Tensor x) { return last(lstm(x.view({2, 2, 8}))); };
  const auto again = [&](torch::Tensor x) { return last(checkpointed(lstm, x.view({2, 2, 8}))); };
  EXPECT_TRUE(are_equal(gradients(*lstm, forward), gradients(*lstm, again)));
}

TEST(Checkpointed, MayBeNested) {
  struct OuterImpl : nn::Module {
    OuterImpl() { register_module("inner", inner); }
    torch::Tensor forward(torch::Tensor x) { return nested ? checkpointed(inner, x) : inner(x); }
    DropoutBlock inner;
    bool nested = false;
  };
  const auto outer = std::make_shared<OuterImpl>();
  const auto usual = gradients(*outer, [&](auto x) { return outer->forward(x); });
  outer->nested = true;
  EXPECT_TRUE(are_equal(usual, gradients(*outer, [&](auto x) { return checkpointed(outer, x); })));
}

TEST(Checkpointed, WithoutGradientsItIsAPlainCall) {
  DropoutBlock block;
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(checkpointed(block, torch::ones({1, 8})).requires_grad());
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(checkpointed(block, torch::ones({1, 8})).is_inference());
  EXPECT_EQ(block->calls, 2);
}

TEST(Checkpointed, InputsThatNeedNoGradientAndFrozenLayersWork) {
  DropoutBlock block;
  checkpointed(block, torch::ones({1, 8})).sum().backward();
  EXPECT_TRUE(block->up->weight.grad().defined());
  for (auto& parameter : block->parameters()) parameter.set_requires_grad(false);
  EXPECT_FALSE(checkpointed(block, torch::ones({1, 8})).requires_grad());
  auto x = torch::ones({1, 8}).requires_grad_();
  checkpointed(block, x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(Checkpointed, HooksOfParametersAndTensorsRunOnce) {
  DropoutBlock block;
  int calls = 0;
  block->up->weight.register_hook([&](const torch::Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const auto usual = gradients(*block, [&](auto x) { return block(x); });
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(are_equal(usual, gradients(*block, [&](auto x) { return checkpointed(block, x); })));
  EXPECT_EQ(calls, 2);
}

TEST(Checkpointed, GradientsOfSomeTensorsCanBeAskedFor) {
  DropoutBlock block;
  auto x = torch::ones({1, 8}).requires_grad_();
  const auto y = checkpointed(block, x);
  const auto found = torch::autograd::grad({y.sum()}, {x});
  EXPECT_TRUE(found[0].defined());
  EXPECT_FALSE(block->up->weight.grad().defined());
}

TEST(Checkpointed, RunningStatisticsAreUpdatedOnce) {
  nn::Sequential net(nn::Linear(8, 8), nn::BatchNorm1d(8));
  const auto train = [&](bool checkpoints) {
    auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
    const auto x = numbers({6, 8}, 2);
    (checkpoints ? checkpointed(copy, x) : copy->forward(x)).square().sum().backward();
    auto all = copies(copy->buffers());
    for (const auto& gradient : gradients_of(*copy)) all.push_back(gradient);
    return all;
  };
  EXPECT_TRUE(are_equal(train(false), train(true)));
}

TEST(Checkpointed, AutocastIsThatOfTheForward) {
  nn::Sequential net(nn::Linear(8, 16), nn::Dropout(0.3), nn::Linear(16, 8));
  const auto run = [&](bool checkpoints, bool backward_inside) {
    net->zero_grad();
    torch::manual_seed(2);
    std::optional<AutocastGuard> autocast(std::in_place, torch::kCPU, torch::kBFloat16);
    const auto x = numbers({4, 8}, 2);
    auto y = checkpoints ? checkpointed(net, x) : net->forward(x);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    // The same weights again in the same region, without checkpointing.
    y = y + net->forward(x);
    const auto loss = y.to(torch::kFloat).square().sum();
    if (!backward_inside) autocast.reset();
    loss.backward();
    return gradients_of(*net);
  };
  for (const bool inside : {false, true}) {
    const auto usual = run(false, inside);
    const auto mine = run(true, inside);
    for (std::size_t i = 0; i < usual.size(); ++i) {
      // The casts' gradients are added in another dtype, since the weights are cast twice.
      EXPECT_TRUE(torch::allclose(usual[i], mine[i], 1e-1, 1e-1)) << usual[i] - mine[i];
      EXPECT_GT(mine[i].abs().sum().item<double>(), 0);
    }
  }
}

TEST(Checkpointed, ASecondBackwardIsRefused) {
  DropoutBlock block;
  const auto loss = checkpointed(block, torch::ones({1, 8})).sum();
  loss.backward({}, /*retain_graph=*/true);
  const Error error = error_of([&] { loss.backward(); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("a second backward reaches"));
  const auto other = checkpointed(block, torch::ones({1, 8})).sum();
  EXPECT_THAT(error_of([&] { other.backward({}, {}, /*create_graph=*/true); }).text(),
              HasSubstr("leave create_graph out"));
}

struct WritingImpl : nn::Module {
  WritingImpl() { register_parameter("unused", torch::ones({1})); }
  torch::Tensor forward(torch::Tensor x) { return x.mul_(2); }
};
struct ChangingImpl : nn::Module {
  ChangingImpl() { register_parameter("unused", torch::ones({1})); }
  torch::Tensor forward(const torch::Tensor& x) { return x.repeat({++calls, 1}); }
  int calls = 0;
};

TEST(Checkpointed, MistakesAreNamed) {
  auto x = torch::ones({1, 8}).requires_grad_();
  EXPECT_THAT(error_of([&] { checkpointed(std::make_shared<WritingImpl>(), x * 1); }).text(),
              HasSubstr("writes to its argument in place"));
  const auto y = checkpointed(std::make_shared<ChangingImpl>(), x);
  EXPECT_THAT(error_of([&] { y.sum().backward(); }).text(), HasSubstr("other shapes or dtypes"));
  EXPECT_THAT(error_of([&] { checkpointed(std::shared_ptr<WritingImpl>(), x); }).text(),
              HasSubstr("the module is empty"));
  EXPECT_THAT(error_of([&] { checkpointed(DropoutBlock(nullptr), x); }).text(),
              HasSubstr("the module is empty"));
  DropoutBlock block;
  auto input = x * 1;
  const auto z = checkpointed(block, input);
  input.mul_(2);
  EXPECT_THROW(z.sum().backward(), c10::Error);
}

TEST(Checkpointed, ATensorThatWouldGetNoGradientIsRefused) {
  nn::Linear shared(8, 8);
  nn::Linear borrowing(8, 8);
  borrowing->weight = shared->weight;  // and not registered
  const auto y = checkpointed(borrowing, torch::ones({1, 8}));
  const Error error = error_of([&] { y.sum().backward(); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("a tensor of shape [8, 8] that requires a gradient"));
  // An argument of the program's graph reaches its leaves by itself.
  nn::Linear plain(8, 8);
  checkpointed(plain, shared(torch::ones({1, 8}))).sum().backward();
  EXPECT_TRUE(shared->weight.grad().defined());
}

TEST(Checkpointed, AModuleMayReturnItsArgumentOrAView) {
  nn::Sequential identity(nn::Identity(), nn::Flatten(nn::FlattenOptions().start_dim(0)));
  auto x = numbers({2, 8}, 1).requires_grad_();
  auto y = checkpointed(identity, x);
  (y * y).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), 2 * x));
  nn::Identity same;
  x.mutable_grad().reset();
  y = checkpointed(same, x);
  (y * y).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), 2 * x));
}

TEST(Checkpointed, NothingOfAStepStaysInMemory) {
  DropoutBlock block;
  std::weak_ptr<nn::Module> alive = block.ptr();
  checkpointed(block, torch::ones({1, 8})).sum().backward();
  block = nullptr;
  EXPECT_TRUE(alive.expired());
}

// Uses one of its layers in some steps only.
struct SometimesImpl : nn::Module {
  SometimesImpl()
      : always(register_module("always", nn::Linear(8, 8))),
        sometimes(register_module("sometimes", nn::Linear(8, 8))) {}
  torch::Tensor forward(torch::Tensor x, bool all) {
    x = torch::tanh(always(x));
    return all ? sometimes(x) : x;
  }
  nn::Linear always, sometimes;
};
TORCH_MODULE(Sometimes);

struct CallsSometimesImpl : nn::Module {
  explicit CallsSometimesImpl(bool checkpoints)
      : part(register_module("part", Sometimes())), checkpoints(checkpoints) {}
  torch::Tensor forward(torch::Tensor x, bool all) {
    return checkpoints ? checkpointed(part, x, all) : part(x, all);
  }
  Sometimes part;
  bool checkpoints;
};
TORCH_MODULE(CallsSometimes);

TEST(CheckpointedOnRanks, ParametersThatAreNotUsedGetNoGradient) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup& group) {
    const auto train = [&](bool checkpoints, auto wrap) {
      CallsSometimes net(checkpoints);
      fill_values(*net);
      auto wrapped = wrap(net);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        const auto seed = static_cast<std::uint64_t>(10 * step + group.rank());
        wrapped(numbers({4, 8}, seed), step % 2 == 0).square().mean().backward();
        EXPECT_EQ(net->parameters()[2].grad().defined(), step % 2 == 0);
        optimizer.step();
      }
      return whole(*net);
    };
    const auto by_ddp = [&](CallsSometimes& net) {
      return DistributedDataParallel(net, group, {.find_unused_parameters = true});
    };
    const auto by_shards = [&](CallsSometimes& net) {
      return FullyShardedDataParallel(net, group);
    };
    const auto usual = train(false, by_ddp);
    EXPECT_TRUE(are_equal(usual, train(true, by_ddp)));
    EXPECT_TRUE(are_equal(usual, train(true, by_shards)));
  });
}

TEST(CheckpointedOnRanks, GradientsOfShardsAddUpUnderNoSync) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup& group) {
    struct NetImpl : nn::Module {
      NetImpl() { register_module("body", body); }
      torch::Tensor forward(torch::Tensor x) {
        for (auto& layer : *body) {
          const auto block = std::dynamic_pointer_cast<BlockImpl>(layer.ptr());
          x = checkpoints ? checkpointed(block, x) : block->forward(x);
        }
        return x;
      }
      nn::Sequential body = blocks(3);
      bool checkpoints = false;
    };
    const auto train = [&](bool checkpoints) {
      const auto net = std::make_shared<NetImpl>();
      net->checkpoints = checkpoints;
      fill_values(*net);
      FullyShardedDataParallel sharded(net, group);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        const auto seed = static_cast<std::uint64_t>(10 * step + group.rank());
        const auto quiet = sharded.no_sync(step % 2 == 0);
        const auto a = sharded(numbers({4, 8}, seed));
        const auto b = sharded(numbers({4, 8}, seed + 5));
        (a * b).mean().backward();
        if (step % 2 == 0) continue;
        optimizer.step();
        optimizer.zero_grad();
      }
      return whole(*net);
    };
    EXPECT_TRUE(are_equal(train(false), train(true)));
  });
}

}  // namespace
}  // namespace weft::testing
