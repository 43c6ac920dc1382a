// SPDX-License-Identifier: Apache-2.0
// Outputs of a forward, and those that the loss leaves out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/autograd.h>
#include <torch/nn/modules/linear.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl()
      : a(register_module("a", torch::nn::Linear(2, 2))),
        b(register_module("b", torch::nn::Linear(2, 2))) {
    to(torch::kDouble);
  }
  std::map<std::string, torch::Tensor> forward(torch::Tensor x) {
    std::map<std::string, torch::Tensor> outputs;
    outputs["a"] = a(x);
    outputs["b"] = b(x);
    return outputs;
  }
  torch::nn::Linear a, b;
};

TEST(Graphs, UnusedOutputKeepsItsGradients) {
  for (const bool as_view : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<TwoHeadsImpl>();
      DistributedDataParallel<TwoHeadsImpl> ddp(
          net, group, {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
      const auto x = torch::full({1, 2}, group.rank() + 1.0, torch::kDouble);
      // As far as forward can tell, all outputs depend on all parameters.
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        ddp(x)["a"].sum().backward();
        EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 1.5) << "the average";
        EXPECT_FALSE(net->b->weight.grad().defined()) << "it had no gradient";
      }
      auto both = ddp(x);
      (both["a"] + both["b"]).sum().backward();
      ddp(x)["a"].sum().backward();
      EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), 1.5) << "unchanged";
      // Left out on one rank and used on the other: the average of both.
      net->zero_grad();
      ddp(x)[group.rank() == 0 ? "a" : "b"].sum().backward();
      EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 0.5);
      EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), 1.0);
      // The second of two backwards brings the gradients that the first one has left out.
      net->zero_grad();
      auto late = ddp(x);
      late["a"].sum().backward();
      EXPECT_FALSE(net->b->weight.grad().defined());
      late["b"].sum().backward();
      EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 1.5);
      EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), 1.5);
    });
  }
}

TEST(Graphs, InnerModuleMayUseLeftOutOutputs) {
  for (const auto& options :
       {DdpOptions{.find_unused_parameters = true}, DdpOptions{.static_graph = true}}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<TwoHeadsImpl>();
      DistributedDataParallel<TwoHeadsImpl> ddp(net, group, options);
      const auto x = torch::full({1, 2}, group.rank() + 1.0, torch::kDouble);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        auto outputs = ddp(x);
        outputs["a"].sum().backward({}, /*retain_graph=*/true);
        outputs["a"].sum().backward({}, /*retain_graph=*/true);
        EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 3.0);
        net->forward(x)["b"].sum().backward();
        EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), group.rank() + 1.0)
            << "step " << step << ", this rank's own gradient";
        if (options.static_graph) continue;
        outputs["b"].sum().backward();
        EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), 3.0)
            << "with the earlier local gradient";
      }
      if (!options.static_graph) return;
      auto outputs = ddp(x);
      outputs["a"].sum().backward();
      EXPECT_EQ(harness::error_of([&] { outputs["b"].sum().backward(); }).blame(), Blame::Caller);
    });
  }
}

struct Report {  // of a type that does not show its tensors
  torch::Tensor left;
  int count = 0;
};

TEST(Graphs, HiddenOutputsAreSettledAtTheEnd) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : a(register_module("a", torch::nn::Linear(2, 2))),
            b(register_module("b", torch::nn::Linear(2, 2))) {
        to(torch::kDouble);
      }
      Report forward(torch::Tensor x) { return {a(x), 1}; }
      torch::nn::Linear a, b;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(torch::full({1, 2}, group.rank() + 1.0, torch::kDouble)).left.sum().backward();
      EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 1.5);
      EXPECT_FALSE(net->b->weight.grad().defined());
    }
  });
}

TEST(Graphs, StaticGraphRefusesSecondBackward) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<TwoHeadsImpl>();
    DistributedDataParallel<TwoHeadsImpl> ddp(net, group, {.static_graph = true});
    auto outputs = ddp(torch::ones({1, 2}, torch::kDouble));
    outputs["a"].sum().backward();
    EXPECT_EQ(harness::error_of([&] { outputs["b"].sum().backward(); }).blame(), Blame::Caller);
  });
}

TEST(Graphs, IgnoredOutputIsHarmless) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group, {.find_unused_parameters = true});
    for (int pass = 0; pass < 4; ++pass) ddp(random({2, 6}, 3));
    for (int pass = 0; pass < 3; ++pass) ddp(random({2, 6}, 3)).sum().backward();
    EXPECT_EQ(ddp.stats().passes, 3u);
  });
}

// The options under which DistributedDataParallel inspects a forward's outputs.
const std::vector<DdpOptions> kLooking{{},
                                       {.find_unused_parameters = true},
                                       {.static_graph = true},
                                       {.find_unused_parameters = true, .static_graph = true}};

torch::Tensor grad_of(const torch::Tensor& output, const torch::Tensor& input,
                      bool create_graph = false) {
  return torch::autograd::grad({output}, {input}, {}, create_graph, create_graph)[0];
}

TEST(Grad, GradientPenaltyIsNoSeparatePass) {
  const auto loss_of = [](auto& model, const torch::Tensor& batch) {
    const auto x = batch.clone().requires_grad_();
    const auto y = model(x);
    return y.pow(2).sum() + grad_of(y.sum(), x, /*create_graph=*/true).pow(2).sum();
  };
  for (const auto& options : kLooking) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      Mlp net;
      Mlp plain;
      fill(net);
      fill(plain);
      DistributedDataParallel ddp(net, group, options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        plain->zero_grad();
        const auto batch = random({4, 6}, 50 + step);
        loss_of(ddp, part(batch, group.rank(), 2)).backward();
        (loss_of(plain, batch) / 2).backward();
        EXPECT_LT(difference(gradients(*net), gradients(*plain)), 1e-10) << "step " << step;
      }
      EXPECT_EQ(ddp.stats().passes, 3u);
    });
  }
}

// Adversarial training does so.
TEST(Grad, RanksMayCallItUnequallyOften) {
  for (const auto& options : kLooking) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      Mlp net;
      fill(net);
      DistributedDataParallel ddp(net, group, options);
      const auto attacked = [](auto& model, torch::Tensor x, int times) {
        for (int i = 0; i < times; ++i) {
          x = x.detach().requires_grad_();
          x = x + 0.1 * grad_of(model(x).sum(), x).sign();
        }
        return x.detach();
      };
      for (int step = 0; step < 3; ++step) {
        Mlp plain;
        fill(plain);
        for (int rank = 0; rank < 2; ++rank) {
          const auto x =
              attacked(plain, random({2, 6}, static_cast<std::uint64_t>(60 + rank)), rank + step);
          (plain(x).pow(2).sum() / 2).backward();
        }
        net->zero_grad();
        const auto x = random({2, 6}, static_cast<std::uint64_t>(60 + group.rank()));
        ddp(attacked(ddp, x, group.rank() + step)).pow(2).sum().backward();
        EXPECT_LT(difference(gradients(*net), gradients(*plain)), 1e-10) << "step " << step;
      }
    });
  }
}

struct Pair {
  torch::Tensor left;
  std::optional<torch::Tensor> right;
  void visit_tensors(auto&& visit) {
    visit(left);
    visit(right);
  }
};

TEST(Graphs, NestedOutputsAreTracked) {
  using Nested =
      std::tuple<int, std::vector<torch::Tensor>, std::map<std::string, Pair>, std::string>;
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      for (int i = 0; i < 3; ++i)
        weights.push_back(
            register_parameter("w" + std::to_string(i), torch::ones({2}, torch::kDouble)));
    }
    Nested forward(double x) {
      std::map<std::string, Pair> pairs;
      pairs["p"] = Pair{weights[1] * x, weights[2] * x};
      return {7, {weights[0] * x, (weights[0] * 5).detach(), torch::ones({1})}, pairs, "text"};
    }
    std::vector<torch::Tensor> weights;
  };
  for (const bool is_static : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(
          net, group, {.find_unused_parameters = true, .static_graph = is_static});
      for (int step = 0; step < 6; ++step) {
        net->zero_grad();
        auto [number, list, pairs, text] = ddp(group.rank() + 1.0);
        EXPECT_EQ(number, 7);
        EXPECT_EQ(text, "text");
        EXPECT_FALSE(list[1].requires_grad());
        EXPECT_EQ(list[0][0].item<double>(), group.rank() + 1.0);
        (list[0] + pairs["p"].left + *pairs["p"].right).sum().backward();
        for (const auto& weight : net->weights) EXPECT_EQ(weight.grad()[0].item<double>(), 1.5);
      }
    });
  }
}

}  // namespace
}  // namespace weft::testing
