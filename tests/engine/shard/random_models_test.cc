// SPDX-License-Identifier: Apache-2.0
// Random models, units, options and steps give the bits of DistributedDataParallel.
#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

// What one seed decides, alike on all ranks.
class Choices {
 public:
  explicit Choices(unsigned seed) : generator_(seed) {}
  int below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(generator_); }
  bool one_in(int count) { return below(count) == 0; }

 private:
  std::mt19937 generator_;
};

struct GroupImpl : nn::Module {
  GroupImpl(Choices& choices, std::int64_t width, int depth) {
    const int parts = 1 + choices.below(4);
    for (int i = 0; i < parts; ++i) {
      const std::string name = "part" + std::to_string(i);
      const int kind = choices.below(depth > 0 ? 5 : 4);
      if (kind == 0) {
        linears.push_back(register_module(name, nn::Linear(width, width)));
        steps.push_back([layer = linears.back()](torch::Tensor x) mutable { return layer(x); });
      } else if (kind == 1) {
        nn::LayerNorm norm(nn::LayerNormOptions({width}));
        register_module(name, norm);
        steps.push_back([norm](torch::Tensor x) mutable { return norm(x); });
      } else if (kind == 2) {
        Block block(width, 1 + choices.below(9));
        register_module(name, block);
        steps.push_back([block](torch::Tensor x) mutable { return block(x); });
      } else if (kind == 3) {
        const auto scale = register_parameter(
            name, choices.one_in(2) ? torch::ones({1, width}) : torch::tensor(1.0F));
        steps.push_back([scale](const torch::Tensor& x) { return torch::tanh(x * scale); });
      } else {
        auto inner = std::make_shared<GroupImpl>(choices, width, depth - 1);
        register_module(name, inner);
        steps.push_back([inner](torch::Tensor x) { return inner->forward(std::move(x)); });
      }
      // A layer that runs again later.
      if (choices.one_in(4)) repeated.push_back(steps.size() - 1);
    }
    if (choices.one_in(3))
      for (auto& parameter : parameters())
        if (choices.one_in(3)) parameter.set_requires_grad(false);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& step : steps) x = step(x);
    for (const std::size_t again : repeated) x = steps[again](x);
    return x;
  }
  std::vector<nn::Linear> linears;
  std::vector<std::function<torch::Tensor(torch::Tensor)>> steps;
  std::vector<std::size_t> repeated;
};

struct NetImpl : nn::Module {
  explicit NetImpl(unsigned seed) {
    Choices choices(seed);
    const std::int64_t width = 1 + choices.below(8);
    front = register_module("front", nn::Linear(8, width));
    for (int i = 0, count = 1 + choices.below(3); i < count; ++i)
      groups.push_back(register_module("group" + std::to_string(i),
                                       std::make_shared<GroupImpl>(choices, width, 2)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = front(x);
    for (const auto& group : groups) x = group->forward(x);
    return x;
  }
  nn::Linear front{nullptr};
  std::vector<std::shared_ptr<GroupImpl>> groups;
};

template <class Wrapped>
void train(Wrapped& wrapped, nn::Module& model, const ProcessGroup& group, unsigned seed) {
  Choices choices(seed + 1000);
  const bool accumulates = choices.one_in(3);
  torch::optim::AdamW optimizer(model.parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int part = accumulates ? 0 : 1; part < 2; ++part) {
      const auto local = wrapped.no_sync(part == 0);
      const auto input = static_cast<std::uint64_t>(100 * step + 10 * part + group.rank());
      wrapped(numbers({3, 8}, input)).square().mean().backward();
    }
    optimizer.step();
  }
}

void run_seed(unsigned seed) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    auto reference = std::make_shared<NetImpl>(seed);
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group);
    train(ddp, *reference, group, seed);

    auto model = std::make_shared<NetImpl>(seed);
    fill_values(*model);
    Choices choices(seed + 2000);
    FullyShardOptions options{.reshard_after_forward = choices.one_in(2),
                              .prefetch = choices.below(4)};
    if (choices.one_in(2)) {
      const unsigned kinds = static_cast<unsigned>(choices.below(1 << 10));
      options.units = [kinds](const std::string& name, const nn::Module&) {
        return ((kinds >> (std::hash<std::string>()(name) % 10)) & 1) != 0;
      };
    }
    FullyShardedDataParallel sharded(model, group, options);
    train(sharded, *model, group, seed);
    EXPECT_TRUE(are_equal(whole(*model), copies(reference->parameters()))) << "seed " << seed;
  });
}

TEST(RandomShardedModels, HaveTheBitsOfDdp) {
  for (unsigned seed = 0; seed < 12; ++seed) run_seed(seed);
}

}  // namespace
}  // namespace weft::testing
