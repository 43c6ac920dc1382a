// SPDX-License-Identifier: Apache-2.0
// Results of DistributedDataParallel, under all of its options.
#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

struct Setting {
  const char* name;
  DdpOptions options;
};

class DdpEquality : public ::testing::TestWithParam<Setting> {};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind,
                                                        std::vector<torch::Tensor> parameters) {
  if (kind == "sgd") {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.01));
}

// The parameters after each step of one process that trains on the whole batch.
std::vector<std::vector<torch::Tensor>> reference_run(const std::string& kind, int steps) {
  Mlp net;
  fill(net);
  auto optimizer = make_optimizer(kind, net->parameters());
  std::vector<std::vector<torch::Tensor>> states;
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    torch::mse_loss(net(random({12, 6}, 100 + step)), random({12, 3}, 200 + step)).backward();
    optimizer->step();
    states.emplace_back();
    for (const auto& parameter : net->parameters())
      states.back().push_back(parameter.detach().clone());
  }
  return states;
}

TEST_P(DdpEquality, RanksTrainLikeOneProcess) {
  constexpr int kSteps = 10;
  for (const std::string kind : {"sgd", "adamw"}) {
    const auto expected = reference_run(kind, kSteps);
    for (const int ranks : {2, 3}) {
      harness::run_ranks(harness::As::Threads, ranks, [&](ProcessGroup group) {
        Mlp net;
        fill(net, /*seed=*/static_cast<std::uint64_t>(
                 group.rank() == 0 ? 1 : 99));  // rank 0's values are used
        DistributedDataParallel ddp(net, group, GetParam().options);
        auto optimizer = make_optimizer(kind, net->parameters());
        for (int step = 0; step < kSteps; ++step) {
          optimizer->zero_grad();
          const auto output = ddp(part(random({12, 6}, 100 + step), group.rank(), ranks));
          torch::mse_loss(output, part(random({12, 3}, 200 + step), group.rank(), ranks))
              .backward();
          optimizer->step();
          EXPECT_LT(difference(net->parameters(), expected[static_cast<std::size_t>(step)]), 1e-6)
              << kind << " step " << step;
        }
        EXPECT_EQ(ddp.stats().passes, static_cast<std::size_t>(kSteps));
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, DdpEquality,
    ::testing::Values(
        Setting{"defaults", {}},
        Setting{"a_bucket_for_each_parameter", {.bucket_bytes = 1, .first_bucket_bytes = 1}},
        Setting{"copied_gradients",
                {.bucket_bytes = 100, .first_bucket_bytes = 1, .gradient_as_bucket_view = false}},
        Setting{"find_unused",
                {.bucket_bytes = 100, .first_bucket_bytes = 1, .find_unused_parameters = true}},
        Setting{"static_graph",
                {.bucket_bytes = 100, .first_bucket_bytes = 1, .static_graph = true}},
        Setting{"static_and_unused", {.find_unused_parameters = true, .static_graph = true}}),
    [](const auto& setting) { return setting.param.name; });

TEST(Ddp, OneRankIsPlainTraining) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    Mlp net;
    Mlp plain;
    fill(net);
    fill(plain);
    DistributedDataParallel ddp(net, group);
    ddp(random({4, 6}, 1)).sum().backward();
    plain(random({4, 6}, 1)).sum().backward();
    EXPECT_EQ(difference(gradients(*net), gradients(*plain)), 0.0);
  });
}

TEST(Ddp, TakesModulesOfAnySignature) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() : weight(register_parameter("weight", torch::ones({2}, torch::kDouble))) {}
    std::tuple<torch::Tensor, int> forward(const torch::Tensor& x, int factor,
                                           std::string text = "a") {
      return {x * weight * factor, static_cast<int>(text.size())};
    }
    torch::Tensor weight;
  };
  struct Trainer {
    DistributedDataParallel<TwoImpl> ddp;
  };
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto module = std::make_shared<TwoImpl>();
    DistributedDataParallel ddp(module, group, DdpOptions{});
    static_assert(std::is_same_v<decltype(ddp), DistributedDataParallel<TwoImpl>>);
    auto [y, size] = ddp.forward(torch::ones({2}, torch::kDouble), 3, "three");
    EXPECT_EQ(size, 5);
    y.sum().backward();
    EXPECT_EQ(ddp.module()->weight.grad()[0].item<double>(), 3.0);
    Trainer trainer{DistributedDataParallel<TwoImpl>(std::make_shared<TwoImpl>(),
                                                     group)};  // moved into a member
    std::get<0>(trainer.ddp(torch::ones({2}, torch::kDouble), 2)).sum().backward();
    EXPECT_EQ(trainer.ddp.module()->weight.grad()[0].item<double>(), 2.0);
  });
}

// The source is always rank 0, and no tensor can be left out.
TEST(Ddp, CopiesRankZerosParametersAndBuffers) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl() : norm(register_module("norm", torch::nn::BatchNorm1d(4))) {}
      torch::Tensor forward(torch::Tensor x) { return norm(x); }
      torch::nn::BatchNorm1d norm;
    };
    auto net = std::make_shared<NetImpl>();
    {
      const torch::NoGradGuard no_grad;
      net->norm->weight.fill_(group.rank() + 1);
      net->norm->running_mean.fill_(group.rank() + 5);
      net->norm->num_batches_tracked.fill_(group.rank() + 7);
    }
    DistributedDataParallel<NetImpl> ddp(net, group);
    EXPECT_EQ(net->norm->weight[0].item<float>(), 1.0f);
    EXPECT_EQ(net->norm->running_mean[0].item<float>(), 5.0f);
    EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 7);
  });
}

TEST(Ddp, GradientsKeepTheMemoryOrder) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{25} << 20}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      torch::nn::Conv2d net(3, 4, 3);
      net->weight.set_data(net->weight.contiguous(at::MemoryFormat::ChannelsLast));
      DistributedDataParallel ddp(net, group, {.bucket_bytes = bytes, .first_bucket_bytes = bytes});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        ddp(torch::randn({2, 3, 5, 5})).sum().backward();
        EXPECT_EQ(net->weight.grad().strides(), net->weight.strides());
      }
    });
  }
}

TEST(Ddp, HalfGradientsDoNotOverflow) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl() : weight(register_parameter("weight", torch::ones({4}, torch::kHalf))) {}
      torch::Tensor forward(torch::Tensor x) { return weight * x; }
      torch::Tensor weight;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group);
    ddp(torch::full({4}, 32768.0, torch::kHalf)).sum().backward();
    EXPECT_TRUE(net->weight.grad().eq(32768.0).all().item<bool>()) << net->weight.grad();
  });
}

// Mixed precision: the forward computes in bfloat16; gradients have the parameters' dtype and are
// averaged in it.
TEST(Ddp, WorksUnderAutocast) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net, alone;
    for (Mlp* const one : {&net, &alone}) {
      fill(*one);
      (*one)->to(at::kFloat);
    }
    DistributedDataParallel ddp(net, group);
    const auto input = random({8, 6}, 300 + group.rank()).to(at::kFloat);
    const auto wanted = random({8, 3}, 400 + group.rank()).to(at::kFloat);
    const auto loss_of = [&](auto& model) {
      const AutocastGuard mixed(at::kCPU, at::kBFloat16);
      const auto output = model(input);
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      return torch::mse_loss(output.to(at::kFloat), wanted);
    };
    for (int step = 0; step < 3; ++step) {  // the second backward has other buckets
      net->zero_grad();
      alone->zero_grad();
      loss_of(ddp).backward();
      loss_of(alone).backward();
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        auto expected = alone->parameters()[i].grad().clone();
        group.all_reduce(expected, ReduceOp::Avg).wait();
        EXPECT_EQ(net->parameters()[i].grad().scalar_type(), at::kFloat);
        EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), expected))
            << "parameter " << i << ", step " << step;
      }
    }
  });
}

TEST(Ddp, ComplexGradientsKeepBothParts) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : complex(register_parameter("complex", torch::ones({3}, torch::kComplexDouble))),
            real(register_parameter("real", torch::ones({3}, torch::kDouble))) {}
      torch::Tensor forward(const torch::Tensor& x) {
        return torch::view_as_real(complex * x).sum() + real.sum();
      }
      torch::Tensor complex, real;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group);
    const auto x = torch::complex(torch::full({3}, 1.0 + group.rank(), torch::kDouble),
                                  torch::full({3}, 2.0, torch::kDouble));
    ddp(x).backward();
    // d/dz of Re(zx) + Im(zx): conj(x) (1 + i)
    const auto mean = torch::complex(torch::full({3}, 1.5, torch::kDouble),
                                     torch::full({3}, 2.0, torch::kDouble));
    const auto expected = mean.conj() * c10::complex<double>(1, 1);
    EXPECT_LT((net->complex.grad() - expected).abs().max().item<double>(), 1e-12);
    EXPECT_EQ(net->real.grad()[0].item<double>(), 1.0);
  });
}

TEST(Ddp, DtypesTravelInSeparateBuckets) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl() {
        for (int i = 0; i < 6; ++i) {
          weights.push_back(
              register_parameter("w" + std::to_string(i),
                                 torch::ones({10}, i % 2 == 0 ? torch::kFloat : torch::kDouble)));
        }
      }
      torch::Tensor forward(double x) {
        torch::Tensor sum = torch::zeros({}, torch::kDouble);
        for (std::size_t i = 0; i < weights.size(); ++i)
          sum = sum + (weights[i].to(torch::kDouble) * x * static_cast<double>(i)).sum();
        return sum;
      }
      std::vector<torch::Tensor> weights;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group,
                                         {.bucket_bytes = 80, .first_bucket_bytes = 40});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(group.rank() + 1.0).backward();
      for (std::size_t i = 0; i < 6; ++i) {
        EXPECT_NEAR(net->weights[i].grad()[3].item<double>(), 1.5 * static_cast<double>(i), 1e-6);
      }
    }
    EXPECT_TRUE(ddp.stats().rebuilt);
    EXPECT_EQ(ddp.stats().bucket_bytes, (std::vector<std::size_t>{80, 40, 80, 80, 80}));
  });
}

TEST(Ddp, BucketsFollowTheOrderOfGradients) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    // Declared first and used last, so its gradient is computed first.
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : last(register_module("last", torch::nn::Linear(4, 4))),
            first(register_module("first", torch::nn::Linear(4, 4))) {}
      torch::Tensor forward(torch::Tensor x) { return last(torch::relu(first(x))); }
      torch::nn::Linear last, first;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    std::vector<const void*> launched;
    ddp.register_comm_hook([&, reduce = comm_hooks::all_reduce(group)](GradBucket& bucket) {
      EXPECT_EQ(bucket.is_last(), bucket.index() == 3);
      launched.push_back(bucket.parameters().front().unsafeGetTensorImpl());
      return reduce(bucket);
    });
    ddp(torch::randn({2, 4})).sum().backward();
    launched.clear();
    ddp(torch::randn({2, 4})).sum().backward();
    ASSERT_EQ(launched.size(), 4u);
    const std::set<const void*> early(launched.begin(), launched.begin() + 2);
    EXPECT_TRUE(early.contains(net->last->weight.unsafeGetTensorImpl()));
    EXPECT_TRUE(early.contains(net->last->bias.unsafeGetTensorImpl()));
  });
}

TEST(Ddp, EvaluationNeedsNoOtherRank) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : linear(register_module("linear", torch::nn::Linear(4, 4))),
            norm(register_module("norm", torch::nn::BatchNorm1d(4))) {}
      torch::Tensor forward(torch::Tensor x) { return norm(linear(x)); }
      torch::nn::Linear linear;
      torch::nn::BatchNorm1d norm;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group);
    if (group.rank() == 0) {
      for (int pass = 0; pass < 6; ++pass) {
        const torch::NoGradGuard no_grad;
        ddp(torch::randn({3, 4}));
      }
      net->eval();
      for (int pass = 0; pass < 6; ++pass) ddp(torch::randn({3, 4}));
      net->train();
    }
    group.barrier().wait();
    ddp(torch::randn({3, 4})).sum().backward();
  });
}

TEST(Ddp, BuffersFollowRankZero) {
  for (const bool broadcast : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      struct NetImpl : torch::nn::Module {
        NetImpl()
            : weight(register_parameter("weight", torch::ones({1}))),
              buffer(register_buffer("buffer", torch::zeros({1}))) {}
        torch::Tensor forward(const torch::Tensor& x) { return weight * x + buffer.detach(); }
        torch::Tensor weight, buffer;
      };
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(net, group, {.broadcast_buffers = broadcast});
      for (int step = 1; step < 4; ++step) {
        net->buffer.fill_(10 * step + group.rank());
        ddp(torch::ones({1}));
        ddp(torch::ones({1})).sum().backward();  // several forwards before one backward
        EXPECT_EQ(net->buffer.item<float>(),
                  static_cast<float>(10 * step + (broadcast ? 0 : group.rank())));
      }
    });
  }
}

TEST(Ddp, BatchNormForwardsShareABackward) {
  struct NetImpl : torch::nn::Module {
    NetImpl() : norm(register_module("norm", torch::nn::BatchNorm1d(4))) { to(torch::kDouble); }
    torch::Tensor forward(torch::Tensor x) { return norm(x); }
    torch::nn::BatchNorm1d norm;
  };
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<NetImpl>();
    auto plain = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      plain->zero_grad();
      const auto loss = [&](auto& model) {
        return (model(random({5, 4}, 1)) * model(random({5, 4}, 2))).pow(2).sum();
      };
      loss(ddp).backward();
      loss(plain->norm).backward();
      EXPECT_LT(difference(gradients(*net), gradients(*plain)), 1e-12) << "step " << step;
      EXPECT_LT(difference(net->buffers(), plain->buffers()), 1e-12) << "step " << step;
    }
  });
}

TEST(Ddp, SparseGradientsAreAveraged) {
  for (const bool as_view : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      struct NetImpl : torch::nn::Module {
        NetImpl()
            : table(register_module(
                  "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)))),
              linear(register_module("linear", torch::nn::Linear(3, 2))) {
          to(torch::kDouble);
        }
        torch::Tensor forward(torch::Tensor x) { return linear(table(x)); }
        torch::nn::Embedding table;
        torch::nn::Linear linear;
      };
      const std::vector<torch::Tensor> inputs{torch::tensor({1, 2, 2}),
                                              torch::tensor({2, 7, 9, 9})};
      auto make = [] {
        auto net = std::make_shared<NetImpl>();
        fill(net);
        return net;
      };
      auto net = make();
      DistributedDataParallel<NetImpl> ddp(net, group, {.gradient_as_bucket_view = as_view});
      std::vector<torch::Tensor> mean;
      for (int rank = 0; rank < 2; ++rank) {
        auto plain = make();
        plain->forward(inputs[static_cast<std::size_t>(rank)]).sum().backward();
        mean.push_back(plain->table->weight.grad().to_dense() / 2);
      }
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        ddp(inputs[static_cast<std::size_t>(group.rank())]).sum().backward();
        const auto gradient = net->table->weight.grad();
        ASSERT_TRUE(gradient.is_sparse());
        EXPECT_LT((gradient.to_dense() - mean[0] - mean[1]).abs().max().item<double>(), 1e-12);
      }
    });
  }
}

TEST(Ddp, SparseHalfGradientsDoNotOverflow) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : table(register_module(
                "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(3, 2).sparse(true)))) {
        to(torch::kHalf);
      }
      torch::Tensor forward(torch::Tensor x) { return table(x); }
      torch::nn::Embedding table;
    };
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, group);
    ddp(torch::tensor({1})).backward(torch::full({1, 2}, 32768.0, torch::kHalf));
    const auto gradient = net->table->weight.grad().to_dense();
    EXPECT_TRUE(gradient[1].eq(32768.0).all().item<bool>()) << gradient;
  });
}

TEST(Ddp, CheckpointResumesExactly) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const auto steps = [&](DistributedDataParallel<MlpImpl>& ddp, torch::optim::SGD& optimizer,
                           int from, int to) {
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        ddp(part(random({8, 6}, 300 + step), group.rank(), 2)).pow(2).sum().backward();
        optimizer.step();
      }
    };
    const auto options = torch::optim::SGDOptions(0.01).momentum(0.9);
    Mlp whole;
    fill(whole);
    DistributedDataParallel ddp(whole, group);
    torch::optim::SGD optimizer(whole->parameters(), options);
    steps(ddp, optimizer, 0, 3);
    std::stringstream model;
    std::stringstream state;
    torch::save(whole, model);
    torch::save(optimizer, state);
    steps(ddp, optimizer, 3, 6);

    Mlp resumed;
    torch::load(resumed, model);
    DistributedDataParallel again(resumed, group);
    torch::optim::SGD resumed_optimizer(resumed->parameters(), options);
    torch::load(resumed_optimizer, state);
    steps(again, resumed_optimizer, 3, 6);
    EXPECT_EQ(difference(resumed->parameters(), whole->parameters()), 0.0);
  });
}

}  // namespace
}  // namespace weft::testing
