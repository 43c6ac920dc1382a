// What a forward returns, and what the loss leaves out of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() : a(register_module("a", torch::nn::Linear(2, 2))), b(register_module("b", torch::nn::Linear(2, 2))) {
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

// DD-011
TEST(Graphs, AnOutputLeftOutOfTheLossLeavesItsGradientsAsTheyWere) {
  for (const bool as_view : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<TwoHeadsImpl>();
      DistributedDataParallel<TwoHeadsImpl> ddp(net, group,
                                                {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
      const auto x = torch::full({1, 2}, group.rank() + 1.0, torch::kDouble);
      // All outputs depend on all parameters as far as forward can tell.
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        ddp(x)["a"].sum().backward();
        EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 1.5) << "the average";
        EXPECT_FALSE(net->b->weight.grad().defined()) << "it had none";
      }
      auto both = ddp(x);
      (both["a"] + both["b"]).sum().backward();
      ddp(x)["a"].sum().backward();
      EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), 1.5) << "as it was";
      // Left out here, used there: the average of both.
      net->zero_grad();
      ddp(x)[group.rank() == 0 ? "a" : "b"].sum().backward();
      EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 0.5);
      EXPECT_EQ(net->b->weight.grad()[0][0].item<double>(), 1.0);
      // What the second of two backwards brings would be this rank's alone.
      auto late = ddp(x);
      late["a"].sum().backward();
      EXPECT_EQ(harness::error_of([&] { late["b"].sum().backward(); }).blame(), Blame::Caller);
      ddp(x)["a"].sum().backward();
    });
  }
}

struct Report {  // of a type that does not say what it holds
  torch::Tensor left;
  int count = 0;
};

// DD-012
TEST(Graphs, WhatAForwardWithoutVisibleOutputsLeavesOutIsKnownAtTheEnd) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl() : a(register_module("a", torch::nn::Linear(2, 2))), b(register_module("b", torch::nn::Linear(2, 2))) {
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

// DD-006, 010
TEST(Graphs, ASecondBackwardOfAStaticGraphIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<TwoHeadsImpl>();
    DistributedDataParallel<TwoHeadsImpl> ddp(net, group, {.static_graph = true});
    auto outputs = ddp(torch::ones({1, 2}, torch::kDouble));
    outputs["a"].sum().backward();
    EXPECT_EQ(harness::error_of([&] { outputs["b"].sum().backward(); }).blame(), Blame::Caller);
  });
}

TEST(Graphs, AnOutputThatIsIgnoredCompletelyDoesNoHarm) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group, {.find_unused_parameters = true});
    for (int pass = 0; pass < 4; ++pass) ddp(random({2, 6}, 3));
    for (int pass = 0; pass < 3; ++pass) ddp(random({2, 6}, 3)).sum().backward();
    EXPECT_EQ(ddp.stats().passes, 3u);
  });
}

struct Pair {
  torch::Tensor left;
  std::optional<torch::Tensor> right;
  void visit_tensors(auto&& visit) {
    visit(left);
    visit(right);
  }
};

// DD-012
TEST(Graphs, OutputsOfAnyNestingPassThroughAndAreTracked) {
  using Nested = std::tuple<int, std::vector<torch::Tensor>, std::map<std::string, Pair>, std::string>;
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      for (int i = 0; i < 3; ++i)
        weights.push_back(register_parameter("w" + std::to_string(i), torch::ones({2}, torch::kDouble)));
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
      DistributedDataParallel<NetImpl> ddp(net, group, {.find_unused_parameters = true, .static_graph = is_static});
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
