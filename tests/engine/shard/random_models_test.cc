// SPDX-License-Identifier: Apache-2.0
// Random models, units, options, meshes and steps give what DistributedDataParallel does: over two
// ranks the same bits.
// WEFT_TEST_MODELS=SEED or SEED:COUNT runs these models instead.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <optional>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <weft/mesh.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

// One seed decides these choices, alike on all ranks.
class Choices {
 public:
  explicit Choices(unsigned seed) : generator_(seed) {}
  int below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(generator_); }
  bool one_in(int count) { return below(count) == 0; }

 private:
  std::mt19937 generator_;
};

// Counts the features that the models of this run have had.
class Covered {
 public:
  static void note(const std::string& what) {
    const std::lock_guard lock(mutex_);
    all_.insert(what);
  }
  static std::set<std::string> all() {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::set<std::string> all_;
};

// Computes with a weight of another layer.
struct BorrowingImpl : nn::Module {
  explicit BorrowingImpl(const torch::Tensor& lent) : weight(register_parameter("weight", lent)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(torch::linear(x, weight)); }
  torch::Tensor weight;
};
TORCH_MODULE(Borrowing);

struct GroupImpl : nn::Module {
  GroupImpl(Choices& choices, std::int64_t width, int depth) {
    const int parts = 1 + choices.below(4);
    for (int i = 0; i < parts; ++i) {
      const std::string name = "part" + std::to_string(i);
      const int kind = choices.below(depth > 0 ? 5 : 4);
      if (kind == 0 && !linears.empty() && choices.one_in(2)) {
        Covered::note("shared parameters");
        uses_once = false;
        Borrowing borrowing(linears.front()->weight);
        register_module(name, borrowing);
        steps.push_back([borrowing](const torch::Tensor& x) mutable { return borrowing(x); });
      } else if (kind == 0) {
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
        groups.emplace_back(steps.size(), inner);
        uses_once = uses_once && inner->uses_once;
        steps.push_back([inner](torch::Tensor x) { return inner->run(std::move(x)); });
      }
      // A layer that runs again later.
      if (choices.one_in(4)) repeated.push_back(steps.size() - 1);
    }
    uses_once = uses_once && repeated.empty();
    if (choices.one_in(3))
      for (auto& parameter : parameters())
        if (choices.one_in(3)) parameter.set_requires_grad(false);
  }
  // As a part of a model does it.
  torch::Tensor run(torch::Tensor x) {
    return recomputes ? checkpointed(*this, std::move(x)) : forward(std::move(x));
  }
  // Chooses groups that compute their activations again. A gradient that is the sum of several in
  // each of several runs would be summed in another order.
  void recompute(Choices& choices) {
    recomputes = choices.one_in(2);
    if (recomputes) Covered::note("recomputation");
    for (const auto& [step, group] : groups) {
      if (std::ranges::find(repeated, step) != repeated.end() && !group->uses_once) continue;
      group->recompute(choices);
      if (recomputes && group->recomputes) Covered::note("recomputation inside of another");
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& step : steps) x = step(x);
    for (const std::size_t again : repeated) x = steps[again](x);
    return x;
  }
  bool recomputes = false;
  bool uses_once = true;  // each parameter, in one run
  std::vector<std::pair<std::size_t, std::shared_ptr<GroupImpl>>> groups;  // with their steps
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
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if ((left_out >> i & 1U) == 0) x = groups[i]->run(x);
    }
    return x;
  }
  void recompute(Choices& choices) {
    for (const auto& group : groups) group->recompute(choices);
  }
  unsigned left_out = 0;  // bits of the groups that the next forward does not use
  nn::Linear front{nullptr};
  std::vector<std::shared_ptr<GroupImpl>> groups;
};

template <class Wrapped>
void train(Wrapped& wrapped, NetImpl& model, const ProcessGroup& group, unsigned seed) {
  Choices choices(seed + 1000);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  // AdamW makes a step of a gradient that is rounding alone.
  if (choices.one_in(2) && group.size() == 2) {
    optimizer = std::make_unique<torch::optim::AdamW>(model.parameters());
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(model.parameters(),
                                                    torch::optim::SGDOptions(0.01).momentum(0.9));
  }
  const bool accumulates = choices.one_in(3), leaves_out = choices.one_in(2);
  std::uint64_t inputs = static_cast<std::uint64_t>(group.rank());
  const auto loss = [&] {
    if (leaves_out) model.left_out = static_cast<unsigned>(choices.below(1 << 3));
    if ((model.left_out & ((1U << model.groups.size()) - 1)) != 0) Covered::note("unused units");
    inputs += 10;
    return wrapped(numbers({3, 8}, inputs)).square().mean();
  };
  if (accumulates) Covered::note("no_sync");
  for (const auto& parameter : model.parameters())
    if (!parameter.requires_grad()) Covered::note("frozen parameters");
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    for (int part = accumulates ? 0 : 1; part < 2; ++part) {
      const auto local = wrapped.no_sync(part == 0);
      loss().backward();
    }
    optimizer->step();
  }
}

FullyShardOptions draw_options(Choices& choices) {
  FullyShardOptions options{.reshard_after_forward = choices.one_in(2),
                            .prefetch = choices.below(4)};
  if (choices.one_in(2)) {
    const auto kinds = static_cast<unsigned>(choices.below(1 << 10));
    options.units = [kinds](const std::string& name, const nn::Module&) {
      const auto is_unit = [kinds](const std::string& one) {
        return ((kinds >> (std::hash<std::string>()(one) % 10)) & 1U) != 0;
      };
      if (!is_unit(name)) return false;
      const auto inner = name.rfind('.');
      if (inner != std::string::npos && is_unit(name.substr(0, inner)))
        Covered::note("nested units");
      return true;
    };
  }
  return options;
}

// One axis, or two. With one rank along one of them the sums are in the order of
// DistributedDataParallel's, with two along both they are not.
std::optional<Mesh> draw_mesh(Choices& choices, const ProcessGroup& group) {
  using Axes = std::vector<MeshAxis>;
  if (group.size() == 4) return Mesh(group, Axes{{"copies", 2}, {"rows", 2}});
  const int axes = choices.below(4);
  if (axes == 0) return std::nullopt;
  return Mesh(group, axes == 1 ? Axes{{"rows", 2}} : Axes{{"copies", axes - 1}, {"rows", -1}});
}

void compare(const std::vector<torch::Tensor>& values, const std::vector<torch::Tensor>& expected,
             bool bits) {
  if (bits) {
    EXPECT_TRUE(are_equal(values, expected));
    return;
  }
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_TRUE(torch::allclose(values[i], expected[i], 1e-4, 1e-6)) << i;
}

void run_seed(unsigned seed) {
  const int ranks = seed % 5 == 0 ? 4 : 2;
  run_ranks(As::Threads, ranks, [&](ProcessGroup& group) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto reference = std::make_shared<NetImpl>(seed);
    fill_values(*reference);
    DistributedDataParallel ddp(reference, group, {.find_unused_parameters = true});
    train(ddp, *reference, group, seed);

    auto model = std::make_shared<NetImpl>(seed);
    fill_values(*model);
    Choices choices(seed + 2000);
    const FullyShardOptions options = draw_options(choices);
    model->recompute(choices);
    const auto train_sharded = [&](const auto& over) {
      FullyShardedDataParallel sharded(model, over, options);
      train(sharded, *model, group, seed);
      compare(whole(*model), copies(reference->parameters()), ranks == 2);
    };
    if (const auto mesh = draw_mesh(choices, group)) {
      train_sharded(*mesh);
    } else {
      train_sharded(group);
    }
  });
}

TEST(RandomShardedModels, TrainAsDdp) {
  const char* const wanted = std::getenv("WEFT_TEST_MODELS");
  unsigned first = 1, count = harness::runs_all_settings() ? 500 : 10;
  if (wanted != nullptr) {
    const std::string text = wanted;
    const auto colon = text.find(':');
    first = static_cast<unsigned>(std::stoul(text));
    count =
        colon == std::string::npos ? 1 : static_cast<unsigned>(std::stoul(text.substr(colon + 1)));
  }
  std::cout << "models of the seeds " << first << " to " << first + count - 1 << std::endl;
  for (unsigned seed = first; seed < first + count && !HasFailure(); ++seed) run_seed(seed);
  if (wanted == nullptr) {
    EXPECT_THAT(Covered::all(),
                ::testing::IsSupersetOf({"nested units", "shared parameters", "frozen parameters",
                                         "no_sync", "recomputation",
                                         "recomputation inside of another", "unused units"}));
  }
}

}  // namespace
}  // namespace weft::testing
