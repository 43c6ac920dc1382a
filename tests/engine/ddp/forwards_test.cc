// SPDX-License-Identifier: Apache-2.0
// Several forwards and backwards of one model, in any order, and modules that change between them.
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <weft/base/log.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

// A model of one weight, whose gradient is the sum of the inputs.
torch::nn::Linear one_weight() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::ones_(net->weight);
  net->to(torch::kDouble);
  return net;
}
torch::Tensor input(double value) { return torch::full({1, 1}, value, torch::kDouble); }
double gradient_of(const torch::Tensor& weight) {
  return weight.grad().defined() ? weight.grad().reshape({-1})[0].item<double>() : -1;
}

// The tests run the same program with each of these options.
const std::vector<DdpOptions> kOptions{{},
                                       {.gradient_as_bucket_view = false},
                                       {.find_unused_parameters = true},
                                       {.static_graph = true},
                                       {.broadcast_buffers = false}};

void with_all_options(
    const std::function<void(ProcessGroup group, const DdpOptions& options)>& body) {
  for (const DdpOptions& options : kOptions) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) { body(group, options); });
  }
}

TEST(Forwards, EachForwardsBackwardIsAveraged) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    const double mine = 1 + group.rank();
    for (const bool in_order : {true, false}) {
      auto net = one_weight();
      DistributedDataParallel ddp(net, group, options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        auto a = ddp(input(mine));
        auto b = ddp(input(10 * mine));
        (in_order ? a : b).sum().backward();
        EXPECT_EQ(gradient_of(net->weight), in_order ? 1.5 : 15);
        (in_order ? b : a).sum().backward();
        EXPECT_EQ(gradient_of(net->weight), 16.5);
      }
      EXPECT_EQ(ddp.stats().passes, 6u);
    }
  });
}

TEST(Forwards, NoSyncBelongsToTheForward) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    const double mine = 1 + group.rank();
    auto net = one_weight();
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      torch::Tensor a;
      {
        const auto quiet = ddp.no_sync();
        a = ddp(input(mine));
      }
      auto b = ddp(input(10 * mine));
      a.sum().backward();
      EXPECT_EQ(gradient_of(net->weight), mine) << "local";
      b.sum().backward();
      EXPECT_EQ(gradient_of(net->weight), 16.5);
    }
    // The other way round: gradients from inside no_sync wait for the next synchronising forward.
    net->zero_grad();
    torch::Tensor a;
    {
      const auto quiet = ddp.no_sync();
      a = ddp(input(mine));
    }
    auto b = ddp(input(10 * mine));
    {
      const auto quiet = ddp.no_sync();  // has no effect on a backward
      b.sum().backward();
    }
    EXPECT_EQ(gradient_of(net->weight), 15);
    a.sum().backward();
    EXPECT_EQ(gradient_of(net->weight), 15 + mine);
    ddp(input(100 * mine)).sum().backward();
    EXPECT_EQ(gradient_of(net->weight), 166.5);
  });
}

TEST(Forwards, NoSyncEndsForAMovedWrapper) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    auto net = one_weight();
    DistributedDataParallel ddp(net, group, options);
    auto moved = [&] {
      const auto quiet = ddp.no_sync();
      return std::move(ddp);
    }();
    moved(input(1 + group.rank())).sum().backward();
    EXPECT_EQ(gradient_of(net->weight), 1.5);
  });
}

TEST(Forwards, NoSyncMixesWithinOneBackward) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    const double mine = 1 + group.rank();
    auto net = one_weight();
    DistributedDataParallel ddp(net, group, options);
    for (const bool quiet_first : {true, false, true}) {
      net->zero_grad();
      const auto forward = [&](double value, bool quiet) {
        const auto scope = ddp.no_sync(quiet);
        return ddp(input(value));
      };
      const auto a = forward(mine, quiet_first);
      const auto b = forward(10 * mine, !quiet_first);
      (a.sum() + b.sum()).backward();
      EXPECT_EQ(gradient_of(net->weight), 16.5);
    }
  });
}

TEST(Forwards, KeptGraphIsAveragedEachTime) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    auto net = one_weight();
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      auto loss = ddp(input(1 + group.rank())).sum();
      for (int times = 1; times <= 3; ++times) {
        loss.backward({}, /*retain_graph=*/true);
        EXPECT_EQ(gradient_of(net->weight), 1.5 * times);
      }
    }
  });
}

struct Opaque {  // does not show the tensors in it
  torch::Tensor loss;
};
struct OpaqueNetImpl : torch::nn::Module {
  OpaqueNetImpl() : weight(register_parameter("weight", torch::ones({1, 1}, torch::kDouble))) {}
  Opaque forward(const torch::Tensor& x) { return {(weight * x).sum()}; }
  torch::Tensor weight;
};

TEST(Forwards, HiddenOutputsAreAveraged) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    const double mine = 1 + group.rank();
    auto net = std::make_shared<OpaqueNetImpl>();
    DistributedDataParallel<OpaqueNetImpl> ddp(net, group, options);
    for (const bool in_order : {true, false, true}) {
      net->zero_grad();
      auto a = ddp(input(mine)).loss;
      auto b = ddp(input(10 * mine)).loss;
      (in_order ? a : b).backward();
      (in_order ? b : a).backward();
      EXPECT_EQ(gradient_of(net->weight), 16.5);
    }
    net->zero_grad();
    torch::Tensor a;
    {
      const auto quiet = ddp.no_sync();
      ddp(input(1000 * mine)).loss.backward();
      EXPECT_EQ(gradient_of(net->weight), 1000 * mine);
      a = ddp(input(mine)).loss;
    }
    auto b = ddp(input(10 * mine)).loss;
    a.backward();
    b.backward();
    EXPECT_EQ(gradient_of(net->weight), 1516.5);
  });
}

// A trunk and two heads.
struct TreeImpl : torch::nn::Module {
  TreeImpl() {
    for (const char* name : {"trunk", "a", "b"})
      weights.push_back(register_parameter(name, torch::ones({1}, torch::kDouble)));
  }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    const auto y = weights[0] * x;
    return {weights[1] * y, weights[2] * y};
  }
  std::vector<torch::Tensor> weights;
};

TEST(Forwards, TwoHeadsAreAveragedOrRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const auto x = torch::full({1}, 1.0 + group.rank(), torch::kDouble);
    auto net = std::make_shared<TreeImpl>();
    {
      DistributedDataParallel<TreeImpl> ddp(net, group, {.find_unused_parameters = true});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        auto [a, b] = ddp(x);
        a.sum().backward({}, /*retain_graph=*/true);
        b.sum().backward();
        EXPECT_EQ(gradient_of(net->weights[0]), 3.0);
        EXPECT_EQ(gradient_of(net->weights[1]), 1.5);
        EXPECT_EQ(gradient_of(net->weights[2]), 1.5);
      }
    }
    net->zero_grad();
    DistributedDataParallel<TreeImpl> ddp(net, group);
    auto [a, b] = ddp(x);
    a.sum().backward({}, /*retain_graph=*/true);
    const Error error = harness::error_of([&, loss = b.sum()] { loss.backward(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("find_unused_parameters"));
  });
}

// --- refusals and warnings

TEST(Forwards, CreateGraphIsRefused) {
  for (const bool as_view : {true, false}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = one_weight();
      DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = as_view});
      auto loss = ddp(input(2)).pow(2).sum();
      const Error error =
          harness::error_of([&] { loss.backward({}, std::nullopt, /*create_graph=*/true); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("torch::autograd::grad"));
    });
  }
}

TEST(Forwards, TwoWrappersInOneBackwardAreRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = one_weight();
    DistributedDataParallel one(net, group);
    DistributedDataParallel other(net, group);
    for (auto* ddp : {&one, &other, &one}) {  // each in a backward of its own
      net->zero_grad();
      (*ddp)(input(1 + group.rank())).sum().backward();
      EXPECT_EQ(gradient_of(net->weight), 1.5);
    }
    auto loss = one(input(1)).sum() + other(input(1)).sum();
    const Error error = harness::error_of([&] { loss.backward(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("two DistributedDataParallel of one module"));
  });
}

// Runs two ranks and returns their log. (harness::run_ranks watches the log itself.)
std::string logged_by(const harness::Body& body) {
  std::mutex mutex;
  std::string text;
  const log::Capture capture([&](LogLevel level, std::string_view line) {
    std::lock_guard lock(mutex);
    if (level <= LogLevel::Warn) text.append(line).append("\n");
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        auto group =
            init_process_group({.rank = rank, .world_size = 2, .store = store, .device = at::kCPU});
        body(group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return text;
}

int count_of(const std::string& text, const std::string& what) {
  int count = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

TEST(Forwards, BypassedWrapperIsWarnedOfOnce) {
  const std::string log = logged_by([](ProcessGroup& group) {
    auto net = one_weight();
    DistributedDataParallel ddp(net, group);
    ddp(input(1)).sum().backward();
    {
      const auto quiet = ddp.no_sync();
      net(input(1)).sum().backward();  // legal inside no_sync
    }
    harness::meet(group);
    for (int step = 0; step < 3; ++step) net(input(1)).sum().backward();
  });
  EXPECT_EQ(count_of(log, "without a forward of this wrapper"), 2) << "one on each rank:\n" << log;
}

TEST(Forwards, TwoWrappersMayTakeTurns) {
  const std::string log = logged_by([](ProcessGroup& group) {
    auto net = one_weight();
    DistributedDataParallel first(net, group);
    DistributedDataParallel second(net, group);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      first(input(1 + group.rank())).sum().backward();
      EXPECT_EQ(gradient_of(net->weight), 1.5);
      second(input(10.0 * (1 + group.rank()))).sum().backward();
      EXPECT_EQ(gradient_of(net->weight), 16.5);
    }
    harness::meet(group);
    net(input(1)).sum().backward();
  });
  EXPECT_EQ(count_of(log, "without a forward of this wrapper"), 4)
      << "one of each wrapper, on each rank:\n"
      << log;
}

TEST(Forwards, MissingGradientsAreWarnedOf) {
  const std::string log = logged_by([](ProcessGroup& group) {
    auto net = std::make_shared<TreeImpl>();
    DistributedDataParallel<TreeImpl> ddp(net, group);
    std::get<0>(ddp(torch::ones({1}, torch::kDouble))).sum().backward();
  });
  EXPECT_EQ(count_of(log, "brought none for parameter 2 (b)"), 2) << log;
}

TEST(Forwards, ModuleWithNewParametersIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Sequential net(torch::nn::Linear(1, 1));
    DistributedDataParallel ddp(net, group);
    ddp.forward(torch::ones({1, 1})).sum().backward();
    net->push_back(torch::nn::Linear(1, 1));
    Error error = harness::error_of([&] { ddp.forward(torch::ones({1, 1})); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("1.weight, 1.bias"));
    const auto quiet = ddp.no_sync();
    EXPECT_EQ(harness::error_of([&] { ddp.forward(torch::ones({1, 1})); }).blame(), Blame::Caller);
  });
}

TEST(Forwards, SkippedBackwardIsReported) {
  for (const char* backend : {"shm", "tcp"}) {
    harness::run_ranks(harness::As::Threads, 2,
                       [](ProcessGroup group) {
                         auto net = one_weight();
                         DistributedDataParallel ddp(net, group);
                         ddp(input(1)).sum().backward();
                         const Error error = harness::error_of([&] {
                           for (int step = 0; step < 2; ++step) {
                             auto loss = ddp(input(1)).sum();
                             if (group.rank() == 0 || step > 0) loss.backward();
                           }
                         });
                         EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
                         EXPECT_THAT(error.text(), HasSubstr("of the gradients of step 2"));
                         EXPECT_THAT(error.text(), HasSubstr("of the gradients of step 3"));
                       },
                       {.backend = backend});
  }
}

TEST(Forwards, BackwardAfterTheWrapperIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = one_weight();
    const auto x = input(1 + group.rank());
    const auto loss = DistributedDataParallel(net, group)(x).sum();
    const auto grads =
        torch::autograd::grad({loss}, {net->parameters().front()}, {}, /*retain_graph=*/true);
    EXPECT_EQ(grads.front().item<float>(), 1 + group.rank());
    const Error error = harness::error_of([&] { loss.backward(); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(),
                HasSubstr("keep the DistributedDataParallel until the backward has ended"));
    DistributedDataParallel kept(net, group);
    kept(x).sum().backward();
    EXPECT_EQ(net->parameters().front().grad().item<float>(), 1.5F);
  });
}

// This may happen to the generator and the discriminator of a GAN.
TEST(Forwards, BackwardsInOtherOrderAreRefused) {
  for (const char* backend : {"shm", "tcp"}) {
    harness::run_ranks(
        harness::As::Threads, 2,
        [](ProcessGroup group) {
          DistributedDataParallel first(one_weight(), group), second(one_weight(), group);
          const Error error = harness::error_of([&] {
            const auto one = first(input(1)).sum(), other = second(input(1)).sum();
            (group.rank() == 0 ? one : other).backward();
            (group.rank() == 0 ? other : one).backward();
          });
          EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
          EXPECT_THAT(error.text(),
                      HasSubstr("of the gradients of step 1 of DistributedDataParallel 1"));
          EXPECT_THAT(error.text(),
                      HasSubstr("of the gradients of step 1 of DistributedDataParallel 2"));
        },
        {.backend = backend});
  }
}

TEST(Forwards, BuffersInOtherOrderAreRefused) {
  harness::run_ranks(
      harness::As::Threads, 2,
      [](ProcessGroup group) {
        const auto normalized = [] { return torch::nn::BatchNorm1d(1); };
        DistributedDataParallel first(normalized(), group), second(normalized(), group);
        const Error error = harness::error_of([&] {
          auto& one = group.rank() == 0 ? first : second;
          auto& other = group.rank() == 0 ? second : first;
          for (int step = 0; step < 2; ++step) {
            one(at::ones({2, 1}));
            other(at::ones({2, 1}));
          }
          group.barrier().wait();
        });
        if (group.rank() == 0)
          return;  // the root only sends, and may hear first that rank 1 has left
        EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
        EXPECT_THAT(error.text(), HasSubstr("of the buffers of DistributedDataParallel 1"));
        EXPECT_THAT(error.text(), HasSubstr("of the buffers of DistributedDataParallel 2"));
      },
      {.backend = "shm"});
}

TEST(Forwards, OneRankMayEvaluateOrCallGrad) {
  for (const char* backend : {"shm", "gloo"}) {
    harness::run_ranks(harness::As::Threads, 2,
                       [](ProcessGroup group) {
                         auto net = one_weight();
                         DistributedDataParallel ddp(net, group);
                         for (int step = 0; step < 3; ++step) {
                           net->zero_grad();
                           if (group.rank() == 1) {
                             net->eval();
                             ddp(input(1));
                             net->train();
                             const torch::NoGradGuard no_grad;
                             ddp(input(1));
                           } else {
                             auto x = input(1).requires_grad_();
                             torch::autograd::grad({ddp(x).sum()}, {x});
                           }
                           ddp(input(1 + group.rank())).sum().backward();
                           EXPECT_EQ(gradient_of(net->weight), 1.5);
                         }
                       },
                       {.backend = backend});
  }
}

// --- frozen, thawed and loaded

TEST(Forwards, ThawedParametersAreAveraged) {
  for (const bool finds_unused : {false, true}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto net = std::make_shared<ChainImpl>(3);
      net->weights[0].set_requires_grad(false);
      DistributedDataParallel<ChainImpl> ddp(net, group, {.find_unused_parameters = finds_unused});
      const auto train = [&] {
        net->zero_grad();
        ddp(torch::full({1}, 1.0 + group.rank(), torch::kDouble)).sum().backward();
        std::vector<double> all;
        for (const auto& weight : net->weights) all.push_back(gradient_of(weight));
        return all;
      };
      EXPECT_EQ(train(), (std::vector<double>{-1, 1.5, 1.5}));
      net->weights[0].set_requires_grad(true);
      for (int step = 0; step < 3; ++step) EXPECT_EQ(train(), (std::vector<double>{1.5, 1.5, 1.5}));
      net->weights[1].set_requires_grad(false);
      net->weights[1].mutable_grad() = torch::full({1}, 7.0 + group.rank(), torch::kDouble);
      for (int step = 0; step < 3; ++step) {
        ddp(torch::full({1}, 1.0 + group.rank(), torch::kDouble)).sum().backward();
        EXPECT_EQ(gradient_of(net->weights[1]), 7 + group.rank())
            << "a frozen parameter keeps its gradient";
        net->weights[0].mutable_grad() = net->weights[2].mutable_grad() = at::Tensor();
      }
      net->weights[1].set_requires_grad(true);
      EXPECT_EQ(train(), (std::vector<double>{1.5, 1.5, 1.5}));
    });
  }
}

class ChangedOnOneRankOnly : public ::testing::TestWithParam<const char*> {
 protected:
  // Calls `change` with the first weight before the second forward, and after it with `late` set.
  static void expect_refused(
      bool trains_first,
      const std::function<void(int rank, at::Tensor& first, bool late)>& change) {
    harness::run_ranks(
        harness::As::Threads, 2,
        [&](ProcessGroup group) {
          auto net = std::make_shared<ChainImpl>(2);
          net->register_buffer("buffer", torch::ones({1}));
          net->weights[0].set_requires_grad(trains_first);
          DistributedDataParallel<ChainImpl> ddp(net, group);
          ddp(torch::ones({1}, torch::kDouble)).sum().backward();
          const Error error = harness::error_of([&] {
            change(group.rank(), net->weights[0], false);
            const auto output = ddp(torch::ones({1}, torch::kDouble));
            change(group.rank(), net->weights[0], true);
            output.sum().backward();
          });
          EXPECT_EQ(error.blame(), Blame::Caller);
          EXPECT_THAT(
              error.text(),
              HasSubstr("requires_grad was changed for parameter 0 (w0) on rank 1, and not alike"));
        },
        {.backend = GetParam(), .timeout = std::chrono::seconds(30)});
  }
};
INSTANTIATE_TEST_SUITE_P(, ChangedOnOneRankOnly, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(ChangedOnOneRankOnly, ThawedParameterIsNamedOnBoth) {
  expect_refused(false, [](int rank, at::Tensor& first, bool late) {
    if (rank == 1 && !late) first.set_requires_grad(true);
  });
}

TEST_P(ChangedOnOneRankOnly, FrozenParameterIsNamedOnBoth) {
  expect_refused(true, [](int rank, at::Tensor& first, bool late) {
    if (rank == 1 && !late) first.set_requires_grad(false);
  });
}

TEST_P(ChangedOnOneRankOnly, LateFreezeIsNamedOnBoth) {
  expect_refused(true, [](int rank, at::Tensor& first, bool late) {
    if (rank == 1 && late) first.set_requires_grad(false);
  });
}

TEST(Forwards, LateFreezeOnAllRanksIsAllowed) {
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    auto net = std::make_shared<ChainImpl>(2);
    DistributedDataParallel<ChainImpl> ddp(net, group);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      const auto output = ddp(torch::full({1}, 1.0 + group.rank(), torch::kDouble));
      net->weights[0].set_requires_grad(false);
      output.sum().backward();
      EXPECT_EQ(gradient_of(net->weights[1]), 1.5);
      EXPECT_FALSE(net->weights[0].grad().defined()) << "an optimizer would step it";
      net->weights[0].set_requires_grad(true);
    }
  });
}

// A loss through a frozen part is added to one that trains it.
TEST(Forwards, ThawedParameterOfAnOlderForwardIsAveraged) {
  for (const bool finds_unused : {false, true}) {
    for (const std::size_t frozen : {0U, 1U}) {
      harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
        auto net = std::make_shared<ChainImpl>(2);
        DistributedDataParallel<ChainImpl> ddp(
            net, group,
            {.bucket_bytes = 1, .first_bucket_bytes = 1, .find_unused_parameters = finds_unused});
        const auto forward = [&] {
          return ddp(torch::full({1}, 1.0 + group.rank(), torch::kDouble)).sum();
        };
        for (int step = 0; step < 3; ++step) {
          net->zero_grad();
          const auto trained = forward();
          net->weights[frozen].set_requires_grad(false);
          const auto through = forward();
          net->weights[frozen].set_requires_grad(true);
          (trained + through).backward();
          EXPECT_EQ(gradient_of(net->weights[frozen]), 1.5);
          EXPECT_EQ(gradient_of(net->weights[1 - frozen]), 3);
        }
      });
    }
  }
}

TEST(Forwards, ParameterThawedAfterItsForwardHasNoGradient) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ChainImpl>(2);
    DistributedDataParallel<ChainImpl> ddp(net, group,
                                           {.bucket_bytes = 1, .first_bucket_bytes = 1});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      net->weights[0].set_requires_grad(false);
      const auto output = ddp(torch::full({1}, 1.0 + group.rank(), torch::kDouble));
      net->weights[0].set_requires_grad(true);
      output.sum().backward();
      EXPECT_FALSE(net->weights[0].grad().defined());
      EXPECT_EQ(gradient_of(net->weights[1]), 1.5);
    }
  });
}

TEST(Forwards, GradAfterTheBackwardIsNoStep) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ChainImpl>(2);
    DistributedDataParallel<ChainImpl> ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = torch::full({1}, 1.0 + group.rank(), torch::kDouble).requires_grad_();
      const auto loss = ddp(x).sum();
      loss.backward({}, /*keep_graph=*/true);
      if (group.rank() == 0) {
        EXPECT_EQ(torch::autograd::grad({loss}, {x}).front().item<double>(), 1);
      }
      EXPECT_EQ(gradient_of(net->weights[1]), 1.5);
    }
  });
}

TEST(Forwards, StaticGraphRefusesFreezing) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto net = std::make_shared<ChainImpl>(2);
    DistributedDataParallel<ChainImpl> ddp(net, group, {.static_graph = true});
    ddp(torch::ones({1}, torch::kDouble)).sum().backward();
    net->weights[1].set_requires_grad(false);
    const Error error = harness::error_of([&] { ddp(torch::ones({1}, torch::kDouble)); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("parameter 1 (w1)"));
  });
}

TEST(Forwards, LoadedModuleIsStillAveraged) {
  with_all_options([](ProcessGroup group, const DdpOptions& options) {
    const harness::Folder folder;
    const std::string file = folder.path() + "/net.pt";
    auto net = one_weight();
    torch::save(net, file);
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < 3; ++step) {
      auto before = ddp(input(10.0 * (1 + group.rank())));
      torch::load(net, file);
      net->zero_grad();
      ddp(input(1 + group.rank())).sum().backward();
      EXPECT_EQ(gradient_of(net->weight), 1.5);
      before.sum().backward();  // of a graph that was made before loading
      EXPECT_EQ(gradient_of(net->weight), 16.5);
    }
  });
}

}  // namespace
}  // namespace weft::testing
