// SPDX-License-Identifier: Apache-2.0
// When the reducer reduces which gradients: overlap, accumulation, unused and shared parameters,
// static graphs. Refusals and failures are in reducer_refusals_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Overlap, BucketStartsBeforeTheNextGradient) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    constexpr int kLayers = 4;
    auto net = std::make_shared<ChainImpl>(kLayers);
    DistributedDataParallel<ChainImpl> ddp(net, group,
                                           {.bucket_bytes = 1, .first_bucket_bytes = 1});
    std::vector<std::string> events;
    for (int i = 0; i < kLayers; ++i) {
      // Runs when the gradient has been computed, before it is accumulated.
      net->weights[static_cast<std::size_t>(i)].register_hook(
          [&events, i](const torch::Tensor& gradient) {
            events.push_back("gradient " + std::to_string(i));
            return gradient;
          });
    }
    ddp.register_comm_hook([&, reduce = comm_hooks::all_reduce(group)](GradBucket& bucket) {
      events.push_back("launch " + std::to_string(bucket.index()));
      return reduce(bucket);
    });
    for (int pass = 0; pass < 3; ++pass) {
      events.clear();
      ddp(torch::ones({1}, torch::kDouble)).sum().backward();
      EXPECT_THAT(events, ElementsAre("gradient 3", "launch 0", "gradient 2", "launch 1",
                                      "gradient 1", "launch 2", "gradient 0", "launch 3"))
          << "pass " << pass;
    }
  });
}

TEST(Overlap, BucketsAreLaunchedInOrder) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    // Two branches whose order of gradients differs between the passes.
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : a(register_parameter("a", torch::ones({1}, torch::kDouble))),
            b(register_parameter("b", torch::ones({1}, torch::kDouble))) {}
      torch::Tensor forward(bool a_first) {
        return a_first ? b * (a * 2).detach() * a : a * (b * 2).detach() * b;
      }
      torch::Tensor a, b;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    std::vector<std::size_t> order;
    ddp.register_comm_hook([&, reduce = comm_hooks::all_reduce(group)](GradBucket& bucket) {
      order.push_back(bucket.index());
      return reduce(bucket);
    });
    for (int pass = 0; pass < 4; ++pass) {
      order.clear();
      ddp((pass + group.rank()) % 2 == 0).sum().backward();
      EXPECT_THAT(order, ElementsAre(0, 1));
    }
  });
}

TEST(Unused, PartlyUsedModelTrainsWithAdam) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    for (const std::size_t bucket_bytes : {std::size_t{1}, std::size_t{25} << 20}) {
      const auto train = [](const auto& model, const auto& forward) {
        torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.1));
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          forward(random({4, 6}, 7 + static_cast<std::uint64_t>(step)), step > 0)
              .pow(2)
              .sum()
              .backward();
          EXPECT_EQ(model->spare->weight.grad().defined(), step > 0) << step;
          EXPECT_GT(model->used->weight.grad().abs().sum().template item<double>(), 0) << step;
          optimizer.step();
        }
      };
      struct NetImpl : torch::nn::Module {
        NetImpl()
            : used(register_module("used", torch::nn::Linear(6, 3))),
              spare(register_module("spare", torch::nn::Linear(6, 3))) {
          to(torch::kDouble);
        }
        torch::Tensor forward(torch::Tensor x, bool uses_all) {
          return uses_all ? used(x) + spare(x) : used(x);
        }
        torch::nn::Linear used, spare;
      };
      auto plain = std::make_shared<NetImpl>(), net = std::make_shared<NetImpl>();
      fill(plain);
      fill(net);
      train(plain, [&](const at::Tensor& x, bool uses_all) { return plain->forward(x, uses_all); });
      DistributedDataParallel<NetImpl> ddp(net, group,
                                           {.bucket_bytes = bucket_bytes,
                                            .first_bucket_bytes = bucket_bytes,
                                            .find_unused_parameters = true});
      train(net, [&](const at::Tensor& x, bool uses_all) { return ddp(x, uses_all); });
      EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-12);
    }
  });
}

TEST(NoSync, AccumulatesUntilTheNextPass) {
  for (const bool as_view : {true, false}) {
    for (const bool hooked : {false, true}) {
      harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
        Mlp net;
        fill(net);
        Mlp plain;
        fill(plain);
        DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = as_view});
        if (hooked) ddp.register_comm_hook(comm_hooks::all_reduce(group));
        for (int round = 0; round < 3; ++round) {
          const auto batch = random({8, 6}, 10 + round);
          {
            const auto quiet = ddp.no_sync();
            ddp(part(batch, group.rank(), 2)).sum().backward();
            const torch::NoGradGuard no_grad;
            ddp(part(batch, group.rank(), 2));  // has no effect
          }
          plain(batch).sum().backward();
          const auto local = gradients(*net);
          ddp(part(batch, group.rank(), 2)).sum().backward();
          plain(batch).sum().backward();
          std::vector<torch::Tensor> expected;
          for (const auto& gradient : gradients(*plain)) expected.push_back(gradient / 2);
          EXPECT_GT(difference(local, expected), 1e-3);
          EXPECT_LT(difference(gradients(*net), expected), 1e-10) << "round " << round;
          net->zero_grad();
          plain->zero_grad();
        }
      });
    }
  }
}

TEST(NoSync, InnerModuleAccumulatesLocally) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group);
    net(random({2, 6}, static_cast<std::uint64_t>(group.rank()))).sum().backward();
    EXPECT_EQ(ddp.stats().passes, 0u);
    ddp(random({2, 6}, 7)).sum().backward();
    EXPECT_EQ(ddp.stats().passes, 1u);
  });
}

TEST(Unused, ParameterKeepsItsGradient) {
  for (const bool as_view : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<PickyImpl>();
      DistributedDataParallel<PickyImpl> ddp(
          net, group, {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
      // All ranks use w0, rank 0 alone uses w1, no rank uses w2.
      ddp(std::vector<bool>{true, group.rank() == 0, false}, 4.0).sum().backward();
      EXPECT_EQ(net->weights[0].grad()[0].item<double>(), 4.0);
      ASSERT_TRUE(net->weights[1].grad().defined());
      EXPECT_EQ(net->weights[1].grad()[0].item<double>(), 2.0);
      EXPECT_FALSE(net->weights[2].grad().defined());
      net->zero_grad();
      net->weights[2].mutable_grad() = torch::full({2}, 0.3, torch::kDouble);
      for (int pass = 0; pass < 3; ++pass) {
        ddp(std::vector<bool>{true, true, false}, 1.0).sum().backward();
        EXPECT_EQ(net->weights[2].grad()[1].item<double>(), 0.3) << "pass " << pass;
      }
    });
  }
}

TEST(Unused, StaticGraphKeepsUnusedGradients) {
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(net, group,
                                           {.find_unused_parameters = true, .static_graph = true});
    net->weights[2].mutable_grad() = torch::full({2}, 0.3, torch::kDouble);
    for (int pass = 0; pass < 3; ++pass) {
      ddp(std::vector<bool>{true, true, false}, 1.0).sum().backward();
      ASSERT_TRUE(net->weights[2].grad().defined()) << "pass " << pass;
      EXPECT_EQ(net->weights[2].grad()[1].item<double>(), 0.3) << "pass " << pass;
    }
  });
}

// As in a step of a generator: the gradient passes through its discriminator, to the input alone.
TEST(Unused, BackwardWithAllFrozenIsNoPass) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ChainImpl>(2);
    DistributedDataParallel<ChainImpl> ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      auto input = torch::full({1}, 2.0, torch::kDouble).requires_grad_();
      for (auto& weight : net->weights) weight.requires_grad_(false);
      ddp(input * 1).sum().backward();
      EXPECT_EQ(input.grad().item<double>(), 1.0);
      for (auto& weight : net->weights) weight.requires_grad_(true);
      net->zero_grad();
      ddp(torch::full({1}, group.rank() + 1.0, torch::kDouble)).sum().backward();
      for (const auto& weight : net->weights) EXPECT_EQ(weight.grad().item<double>(), 1.5);
    }
  });
}

TEST(Unused, RankThatUsesNothingTakesPart) {
  struct NetImpl : torch::nn::Module {
    NetImpl() : weight(register_parameter("weight", torch::ones({1}, torch::kDouble))) {}
    torch::Tensor forward(const torch::Tensor& x, bool uses) { return uses ? x * weight : x * 3; }
    torch::Tensor weight;
  };
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group, {.find_unused_parameters = true});
    ddp(torch::full({1}, 4.0, torch::kDouble).requires_grad_(), group.rank() == 0).sum().backward();
    EXPECT_EQ(net->weight.grad().item<double>(), 2.0);
  });
}

TEST(Unused, ChangingPatternIsAveraged) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(
        net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1, .find_unused_parameters = true});
    const auto used = [](int pass, int rank, int i) {
      return ((pass * 7 + rank * 3 + i * 5) % 4) < 2;
    };
    for (int pass = 0; pass < 12; ++pass) {
      net->zero_grad();
      std::vector<bool> mine;
      for (int i = 0; i < 3; ++i) mine.push_back(used(pass, group.rank(), i));
      auto x = torch::zeros({2}, torch::kDouble).requires_grad_();
      (ddp(mine, group.rank() + 1.0) + x).sum().backward();
      for (int i = 0; i < 3; ++i) {
        double expected = 0;
        bool any = false;
        for (int rank = 0; rank < 3; ++rank) {
          if (!used(pass, rank, i)) continue;
          any = true;
          expected += (rank + 1.0) / 3;
        }
        const auto gradient = net->weights[static_cast<std::size_t>(i)].grad();
        ASSERT_EQ(gradient.defined(), any) << "pass " << pass << " parameter " << i;
        if (any) {
          EXPECT_NEAR(gradient[0].item<double>(), expected, 1e-12);
        }
      }
    }
  });
}

// Two forwards that use different parameters, and one backward of both losses.
TEST(Unused, ForwardsOfOneBackwardAreUnited) {
  for (const std::size_t bucket_bytes : {std::size_t{1}, std::size_t{25} << 20}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<PickyImpl>();
      DistributedDataParallel<PickyImpl> ddp(net, group,
                                             {.bucket_bytes = bucket_bytes,
                                              .first_bucket_bytes = bucket_bytes,
                                              .find_unused_parameters = true});
      for (int pass = 0; pass < 3; ++pass) {
        net->zero_grad();
        const auto first = ddp(std::vector<bool>{true, false, false}, 1.0);
        const auto second = ddp(std::vector<bool>{false, true, false}, 2.0);
        (first + second).sum().backward();
        EXPECT_EQ(net->weights[0].grad()[0].item<double>(), 1.0);
        EXPECT_EQ(net->weights[1].grad()[0].item<double>(), 2.0);
        EXPECT_FALSE(net->weights[2].grad().defined());
      }
      // A forward without a backward delays nothing and counts as no use.
      net->zero_grad();
      ddp(std::vector<bool>{true, true, true}, 1.0);
      ddp(std::vector<bool>{false, true, group.rank() == 0}, 4.0).sum().backward();
      EXPECT_FALSE(net->weights[0].grad().defined());
      EXPECT_EQ(net->weights[1].grad()[0].item<double>(), 4.0);
      EXPECT_EQ(net->weights[2].grad()[0].item<double>(), 2.0);
    });
  }
}

TEST(Unused, UseInsideNoSyncIsRemembered) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<PickyImpl>();
    DistributedDataParallel<PickyImpl> ddp(net, group, {.find_unused_parameters = true});
    {
      const auto quiet = ddp.no_sync();
      ddp(std::vector<bool>{true, true, false}, 3.0).sum().backward();
    }
    ddp(std::vector<bool>{true, false, false}, 1.0).sum().backward();
    EXPECT_EQ(net->weights[0].grad()[0].item<double>(), 4.0);
    EXPECT_EQ(net->weights[1].grad()[0].item<double>(), 3.0);  // averaged: all ranks had 3
    EXPECT_FALSE(net->weights[2].grad().defined());
  });
}

TEST(StaticGraph, DifferentGraphsKeepRanksEqual) {
  for (const bool is_static : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<PickyImpl>();
      DistributedDataParallel<PickyImpl> ddp(
          net, group, {.find_unused_parameters = !is_static, .static_graph = is_static});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        ddp(std::vector<bool>{true, group.rank() == 0, group.rank() == 1}, group.rank() + 1.0)
            .pow(2)
            .sum()
            .backward();
        optimizer.step();
      }
      EXPECT_EQ(ddp.stats().rebuilt, is_static);
      for (const auto& weight : net->weights) {
        std::vector<torch::Tensor> all{torch::zeros_like(weight), torch::zeros_like(weight)};
        group.all_gather(all, weight.detach()).wait();
        EXPECT_TRUE(torch::equal(all[0], all[1]));
      }
    });
  }
}

TEST(Graphs, SharedWeightWorksOverTwoForwards) {
  for (const bool is_static : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      struct NetImpl : torch::nn::Module {
        NetImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {
          to(torch::kDouble);
        }
        torch::Tensor forward(torch::Tensor x) { return linear(torch::tanh(linear(x))); }
        torch::nn::Linear linear;
      };
      auto make = [] {
        auto net = std::make_shared<NetImpl>();
        fill(net);
        return net;
      };
      auto net = make();
      auto plain = make();
      DistributedDataParallel<NetImpl> ddp(net, group, {.static_graph = is_static});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        plain->zero_grad();
        const auto a = random({4, 4}, 20 + step);
        const auto b = random({4, 4}, 30 + step);
        (ddp(part(a, group.rank(), 2)).sum() + ddp(part(b, group.rank(), 2)).pow(2).sum())
            .backward();
        (plain->forward(a).sum() + plain->forward(b).pow(2).sum()).backward();
        std::vector<torch::Tensor> expected;
        for (const auto& gradient : gradients(*plain)) expected.push_back(gradient / 2);
        EXPECT_LT(difference(gradients(*net), expected), 1e-10) << "step " << step;
      }
    });
  }
}

TEST(Graphs, TwoOutputsMayHaveTwoBackwards) {
  for (const bool as_view : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      struct NetImpl : torch::nn::Module {
        NetImpl()
            : a(register_module("a", torch::nn::Linear(3, 3))),
              b(register_module("b", torch::nn::Linear(3, 3))) {
          to(torch::kDouble);
        }
        std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x) { return {a(x), b(x)}; }
        torch::nn::Linear a, b;
      };
      auto net = std::make_shared<NetImpl>();
      fill(net);
      DistributedDataParallel<NetImpl> ddp(net, group, {.gradient_as_bucket_view = as_view});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const auto x = torch::full({1, 3}, group.rank() + 1.0, torch::kDouble);
        auto [first, second] = ddp(x);
        first.sum().backward();
        second.sum().backward();
        EXPECT_EQ(net->a->weight.grad()[0][0].item<double>(), 1.5);
        EXPECT_EQ(net->b->weight.grad()[2][1].item<double>(), 1.5);
      }
    });
  }
}

// Recomputes its segment in backward, by a backward of its own inside the outer one (a re-entrant
// checkpoint).
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Segment = std::function<torch::Tensor(torch::Tensor)>;
  struct Holder : torch::CustomClassHolder {
    Segment segment;
  };
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               Segment segment) {
    const torch::NoGradGuard no_grad;
    auto holder = c10::make_intrusive<Holder>();
    holder->segment = segment;
    context->saved_data["segment"] = c10::IValue::make_capsule(holder);
    context->save_for_backward({x});
    return segment(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto holder = context->saved_data["segment"].toCapsule();
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::Tensor y;
    {
      const torch::AutoGradMode with_grad(true);
      y = static_cast<Holder*>(holder.get())->segment(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

struct RecomputedImpl : torch::nn::Module {
  explicit RecomputedImpl(int times)
      : repeats(times),
        linear(register_module("linear", torch::nn::Linear(4, 4))),
        head(register_module("head", torch::nn::Linear(4, 2))) {
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x.detach().requires_grad_();
    for (int i = 0; i < repeats; ++i)
      x = Checkpoint::apply(
          x, Checkpoint::Segment([this](torch::Tensor y) { return torch::tanh(linear(y)); }));
    return head(x);
  }
  torch::Tensor plain(torch::Tensor x) {
    for (int i = 0; i < repeats; ++i) x = torch::tanh(linear(x));
    return head(x);
  }
  int repeats;
  torch::nn::Linear linear, head;
};

TEST(Recomputation, GivesThePlainGradients) {
  for (const auto& [times, is_static] :
       std::vector<std::pair<int, bool>>{{1, false}, {1, true}, {2, true}}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<RecomputedImpl>(times);
      fill(net);
      auto plain = std::make_shared<RecomputedImpl>(times);
      fill(plain);
      DistributedDataParallel<RecomputedImpl> ddp(
          net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1, .static_graph = is_static});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        plain->zero_grad();
        const auto batch = random({4, 4}, 40 + step);
        ddp(part(batch, group.rank(), 2)).sum().backward();
        plain->plain(batch).sum().backward();
        std::vector<torch::Tensor> expected;
        for (const auto& gradient : gradients(*plain)) expected.push_back(gradient / 2);
        EXPECT_LT(difference(gradients(*net), expected), 1e-10)
            << times << is_static << " step " << step;
      }
    });
  }
}

TEST(Recomputation, RepeatedSegmentNeedsStaticGraph) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<RecomputedImpl>(2);
    DistributedDataParallel<RecomputedImpl> ddp(net, group);
    try {
      ddp(random({2, 4}, 1)).sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("came twice"));
      EXPECT_THAT(error.what(), HasSubstr("static_graph"));
    }
  });
}

}  // namespace
}  // namespace weft::testing
