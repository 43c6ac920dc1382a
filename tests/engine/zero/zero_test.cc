// SPDX-License-Identifier: Apache-2.0
// ZeroRedundancyOptimizer: equality with the optimizer on one rank, owners of parameters and
// states, and the order of messages.
#include <future>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

class Zero : public ::testing::TestWithParam<harness::As> {};
INSTANTIATE_TEST_SUITE_P(As, Zero, ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// Sets the same gradients on every rank. Parameter 2 has none in every third step.
void set_gradients(const std::vector<torch::Tensor>& parameters, int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto parameter = parameters[i];
    parameter.mutable_grad() =
        i == 2 && step % 3 == 0
            ? torch::Tensor()
            : random(parameter.sizes(), static_cast<std::uint64_t>(100 * step) + i);
  }
}

std::string file_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load_file(torch::optim::Optimizer& optimizer, const std::string& file) {
  std::istringstream stream(file);
  torch::load(optimizer, stream);
}

// Makes the same steps with both; expects equal parameters after each.
template <class Optimizer>
void step_both(ZeroRedundancyOptimizer<Optimizer>& zero, const Mlp& net, Optimizer& plain_optimizer,
               const Mlp& plain, int first, int steps) {
  for (int step = first; step < first + steps; ++step) {
    set_gradients(net->parameters(), step);
    set_gradients(plain->parameters(), step);
    zero.step();
    plain_optimizer.step();
    EXPECT_EQ(difference(net->parameters(), plain->parameters()), 0) << "step " << step;
  }
}

template <class Optimizer, class Options>
void expect_equal_to_plain(ProcessGroup& group, const Options& optimizer_options,
                           ZeroOptions options) {
  Mlp net;
  fill(net);
  Mlp plain;
  fill(plain);
  ZeroRedundancyOptimizer<Optimizer> zero(net->parameters(), group, optimizer_options, options);
  Optimizer plain_optimizer(plain->parameters(), optimizer_options);
  step_both(zero, net, plain_optimizer, plain, 0, 7);
}

TEST_P(Zero, EveryOptimizerMatchesOneRank) {
  for (const int ranks : {1, 2, 3}) {
    harness::run_ranks(GetParam(), ranks, [](ProcessGroup group) {
      for (const ZeroOptions options :
           {ZeroOptions{}, ZeroOptions{.shard_bytes = 1}, ZeroOptions{.shard_bytes = 100},
            ZeroOptions{.shard_bytes = 100, .parameters_as_bucket_view = true}}) {
        using namespace torch::optim;
        expect_equal_to_plain<SGD>(group, SGDOptions(0.1).momentum(0.9).weight_decay(0.01),
                                   options);
        expect_equal_to_plain<Adam>(group, AdamOptions(0.01).amsgrad(true), options);
        expect_equal_to_plain<AdamW>(group, AdamWOptions(0.01), options);
        expect_equal_to_plain<Adagrad>(group, AdagradOptions(0.05), options);
        expect_equal_to_plain<RMSprop>(group, RMSpropOptions(0.01), options);
        expect_equal_to_plain<FusedSGD>(group, SGDOptions(0.1).momentum(0.9), options);
        expect_equal_to_plain<FusedAdamW>(group, AdamWOptions(0.01), options);
      }
    });
  }
}

TEST_P(Zero, ShardsAndStatesUseTransports) {
  for (const char* backend : {"shm", "tcp"}) {
    harness::run_ranks(GetParam(), 3,
                       [](ProcessGroup group) {
                         expect_equal_to_plain<torch::optim::Adam>(
                             group, torch::optim::AdamOptions(0.01), {.shard_bytes = 100});
                         Mlp net;
                         ZeroRedundancyOptimizer<torch::optim::Adam> zero(
                             net->parameters(), group, torch::optim::AdamOptions(0.01));
                         set_gradients(net->parameters(), 1);
                         zero.step();
                         zero.consolidate_state_dict(2);
                         if (group.rank() == 2) {
                           EXPECT_FALSE(file_of(zero).empty());
                         }
                       },
                       {.backend = backend});
  }
}

TEST_P(Zero, StateIsOnItsOwnerOnly) {
  harness::run_ranks(GetParam(), 3, [](ProcessGroup group) {
    Mlp net;
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(
        net->parameters(), group, torch::optim::AdamOptions(0.01), {.shard_bytes = 1});
    set_gradients(net->parameters(), 1);
    zero.step();
    std::set<const void*> held;
    for (const auto* optimizer : zero.local_optimizers()) {
      for (const auto& [parameter, state] : optimizer->state()) held.insert(parameter);
    }
    std::set<const void*> owned;
    for (const auto& parameter : net->parameters()) {
      if (zero.owner(parameter) == group.rank()) owned.insert(parameter.unsafeGetTensorImpl());
    }
    EXPECT_EQ(held, owned);
    torch::Tensor count = torch::tensor({static_cast<std::int64_t>(held.size())});
    group.all_reduce(count).wait();
    EXPECT_EQ(count.item<std::int64_t>(), 6);
  });
}

TEST_P(Zero, OwnersDecideTheNewValues) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    std::vector<torch::Tensor> parameters;
    for (const std::int64_t elements : {3, 2, 1}) {
      parameters.push_back(
          torch::full({elements}, group.rank() + 1.0, torch::kDouble).requires_grad_());
      parameters.back().mutable_grad() =
          torch::full({elements}, group.rank() + 0.5, torch::kDouble);
    }
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(parameters, group, torch::optim::SGDOptions(1));
    zero.step();
    EXPECT_EQ(zero.owner(parameters[0]), 0);
    EXPECT_EQ(zero.owner(parameters[1]), 1);
    EXPECT_EQ(zero.owner(parameters[2]), 1);
    for (const auto& parameter : parameters) EXPECT_TRUE(torch::all(parameter == 0.5).item<bool>());
    EXPECT_THROW(zero.owner(torch::ones({1})), Error);
  });
}

TEST_P(Zero, WithDdpMatchesTheWholeBatch) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    Mlp net;
    fill(net, group.rank() == 0 ? 1 : 99);
    Mlp plain;
    fill(plain);
    DistributedDataParallel ddp(net, group, {.bucket_bytes = 100, .first_bucket_bytes = 1});
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(
        net->parameters(), group, torch::optim::AdamWOptions(0.01),
        {.shard_bytes = 100, .parameters_as_bucket_view = true});
    torch::optim::AdamW plain_optimizer(plain->parameters(), torch::optim::AdamWOptions(0.01));
    for (std::uint64_t step = 0; step < 10; ++step) {
      zero.zero_grad();
      torch::mse_loss(ddp(part(random({8, 6}, step), group.rank(), 2)),
                      part(random({8, 3}, 50 + step), group.rank(), 2))
          .backward();
      zero.step();
      plain_optimizer.zero_grad();
      torch::mse_loss(plain(random({8, 6}, step)), random({8, 3}, 50 + step)).backward();
      plain_optimizer.step();
      EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-6) << "step " << step;
    }
  });
}

TEST_P(Zero, MemoryOrdersArePreserved) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    for (const bool as_view : {false, true}) {
      std::vector<torch::Tensor> parameters;
      for (int i = 0; i < 4; ++i) {
        parameters.push_back(torch::zeros({2, 3, 2, 2}, torch::kDouble)
                                 .to(i % 2 == 0 ? torch::MemoryFormat::ChannelsLast
                                                : torch::MemoryFormat::Contiguous)
                                 .requires_grad_());
        parameters.back().mutable_grad() = -random({2, 3, 2, 2}, static_cast<std::uint64_t>(i));
      }
      const auto strides = parameters[0].strides().vec();
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(
          parameters, group, torch::optim::SGDOptions(1), {.parameters_as_bucket_view = as_view});
      zero.step();
      EXPECT_EQ(parameters[0].strides().vec(), strides);
      for (int i = 0; i < 4; ++i) {
        EXPECT_TRUE(torch::equal(parameters[static_cast<std::size_t>(i)],
                                 random({2, 3, 2, 2}, static_cast<std::uint64_t>(i))));
      }
    }
  });
}

// The step of the shard whose parameters have kGated elements waits until the gate is open.
constexpr std::int64_t kGated = 5;
struct Gated : torch::optim::SGD {
  using torch::optim::SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    if (param_groups().front().params().front().numel() == kGated) {
      gate->get_future().wait();
    }
    return SGD::step(std::move(closure));
  }
  static std::unique_ptr<std::promise<void>> gate;
};
std::unique_ptr<std::promise<void>> Gated::gate;

TEST(ZeroOrder, ShardArrivesDuringTheNextStep) {
  Gated::gate = std::make_unique<std::promise<void>>();
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    std::vector<torch::Tensor> parameters;
    for (const std::int64_t elements : {std::int64_t(8), std::int64_t(10), kGated}) {
      parameters.push_back(torch::zeros({elements}, torch::kDouble).requires_grad_());
      parameters.back().mutable_grad() = torch::full({elements}, -1.0, torch::kDouble);
    }
    ZeroRedundancyOptimizer<Gated> zero(parameters, group, torch::optim::SGDOptions(1),
                                        {.shard_bytes = 1});
    ASSERT_EQ(zero.owner(parameters[1]), 0);
    ASSERT_EQ(zero.owner(parameters[0]), 1);
    ASSERT_EQ(zero.owner(parameters[2]), 1);  // rank 1 steps the shard of 8, then the gated one
    if (group.rank() == 1) {
      zero.step();
    } else {
      // Receives the messages of a step by hand, to see when they arrive.
      std::vector<torch::Tensor> arrived;
      for (const auto& parameter : parameters)
        arrived.push_back(torch::zeros_like(parameter).detach());
      static_cast<void>(group.broadcast(torch::ones({10}, torch::kDouble), 0));
      group.broadcast(arrived[0], 1).wait();
      EXPECT_TRUE(torch::all(arrived[0] == 1).item<bool>());
      Gated::gate->set_value();
      group.broadcast(arrived[2], 1).wait();
      EXPECT_TRUE(torch::all(arrived[2] == 1).item<bool>());
    }
  });
}

TEST(ZeroState, PlainOptimizerLoadsItsState) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup group) {
    const auto options = torch::optim::AdamOptions(0.01).amsgrad(true);
    Mlp net;
    fill(net);
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), group, options,
                                                     {.shard_bytes = 1});
    for (int step = 0; step < 4; ++step) {
      set_gradients(net->parameters(), step);
      zero.step();
    }
    zero.consolidate_state_dict(1);
    if (group.rank() == 1) {
      Mlp plain;
      fill(plain);
      torch::optim::Adam plain_optimizer(plain->parameters(), torch::optim::AdamOptions(0.5));
      load_file(plain_optimizer, file_of(zero));
      {
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < 6; ++i) plain->parameters()[i].copy_(net->parameters()[i]);
      }
      step_both(zero, net, plain_optimizer, plain, 4, 3);
    } else {
      for (int step = 4; step < 7; ++step) {
        set_gradients(net->parameters(), step);
        zero.step();
      }
    }
  });
}

TEST(ZeroState, IsSavedWithThePresentLearningRate) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group,
                                                    torch::optim::SGDOptions(0.1));
    set_gradients(net->parameters(), 1);
    zero.step();
    zero.consolidate_state_dict();
    zero.param_groups().front().options().set_lr(0.025);
    if (group.rank() != 0) return;
    torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.5));
    load_file(plain, file_of(zero));
    EXPECT_EQ(plain.param_groups().front().options().get_lr(), 0.025);
  });
}

TEST(ZeroState, AnotherGroupSizeLoadsItsState) {
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  std::string file;
  std::vector<torch::Tensor> values;
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group, options);
    for (int step = 0; step < 4; ++step) {
      set_gradients(net->parameters(), step);
      zero.step();
    }
    zero.consolidate_state_dict();
    if (group.rank() != 0) return;
    file = file_of(zero);
    for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  });
  Mlp plain;
  fill(plain);
  torch::optim::SGD plain_optimizer(plain->parameters(), options);
  for (int step = 0; step < 7; ++step) {
    set_gradients(plain->parameters(), step);
    plain_optimizer.step();
  }
  harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
    Mlp net;
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < 6; ++i) net->parameters()[i].copy_(values[i]);
    }
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group,
                                                    torch::optim::SGDOptions(77));
    load_file(zero, file);
    EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.1);
    for (int step = 4; step < 7; ++step) {
      set_gradients(net->parameters(), step);
      zero.step();
    }
    EXPECT_EQ(difference(net->parameters(), plain->parameters()), 0);
  });
}

TEST(ZeroState, SavingNeedsConsolidation) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), group,
                                                     torch::optim::AdamOptions());
    const auto refused = [&] {
      const Error error = harness::error_of([&] { file_of(zero); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), HasSubstr("call consolidate_state_dict"));
    };
    refused();
    zero.consolidate_state_dict(0);
    if (group.rank() == 0) {
      EXPECT_FALSE(file_of(zero).empty());
    } else {
      refused();
    }
    set_gradients(net->parameters(), 1);
    zero.step();
    refused();
    EXPECT_EQ(harness::error_of([&] { zero.consolidate_state_dict(2); }).blame(), Blame::Caller);
  });
}

// An optimizer whose constructor throws once `accepted` is used up.
struct Picky : torch::optim::SGD {
  Picky(std::vector<torch::optim::OptimizerParamGroup> groups, torch::optim::SGDOptions options)
      : SGD(std::move(groups), options) {
    if (accepted == 0) throw std::invalid_argument("not this one");
    --accepted;
  }
  inline static int accepted = 100;
};

TEST(ZeroGroups, RefusedGroupIsNotAddedInPart) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    Mlp net, plain;
    fill(net);
    fill(plain);
    const torch::optim::SGDOptions options(0.1);
    ZeroRedundancyOptimizer<Picky> zero(net->first->parameters(), group, options,
                                        ZeroOptions{.shard_bytes = 1});
    const auto before = zero.local_optimizers().size();
    Picky::accepted = 1;  // accepts one of two shards
    EXPECT_THROW(zero.add_param_group({net->second->parameters()}), std::invalid_argument);
    Picky::accepted = 100;
    EXPECT_EQ(zero.param_groups().size(), 1U);
    EXPECT_EQ(zero.local_optimizers().size(), before);
    zero.add_param_group({net->second->parameters()});
    zero.add_param_group({net->third->parameters()});
    torch::optim::SGD whole(plain->parameters(), options);
    set_gradients(net->parameters(), 1);
    set_gradients(plain->parameters(), 1);
    zero.step();
    whole.step();
    EXPECT_EQ(difference(net->parameters(), plain->parameters()), 0);
  });
}

TEST_P(Zero, ParameterGroupsKeepTheirOptions) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    const auto option = [](double lr) {
      return std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(lr).momentum(0.5));
    };
    Mlp net;
    fill(net);
    Mlp plain;
    fill(plain);
    const auto some = [](const Mlp& of, std::size_t from, std::size_t to) {
      const auto all = of->parameters();
      return std::vector<torch::Tensor>(all.begin() + static_cast<std::ptrdiff_t>(from),
                                        all.begin() + static_cast<std::ptrdiff_t>(to));
    };
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(
        {{some(net, 0, 2), option(0.1)}, {some(net, 2, 4)}}, group, torch::optim::SGDOptions(0.02));
    torch::optim::SGD plain_optimizer({{some(plain, 0, 2), option(0.1)}, {some(plain, 2, 4)}},
                                      torch::optim::SGDOptions(0.02));
    step_both(zero, net, plain_optimizer, plain, 0, 2);
    const int owner_before = zero.owner(net->parameters()[0]);
    zero.add_param_group({some(net, 4, 6), option(0.3)});
    plain_optimizer.add_param_group({some(plain, 4, 6), option(0.3)});
    EXPECT_EQ(zero.owner(net->parameters()[0]), owner_before);
    step_both(zero, net, plain_optimizer, plain, 2, 3);
    // A parameter that is in a group already.
    EXPECT_EQ(harness::error_of([&] { zero.add_param_group({some(net, 0, 1)}); }).blame(),
              Blame::Caller);
    step_both(zero, net, plain_optimizer, plain, 5, 2);
    // Changes the learning rate through libtorch's schedulers.
    for (auto* optimizer :
         std::initializer_list<torch::optim::Optimizer*>{&zero, &plain_optimizer}) {
      torch::optim::StepLR schedule(*optimizer, 1, 0.1);
      schedule.step();
    }
    step_both(zero, net, plain_optimizer, plain, 7, 3);
  });
}

TEST(ZeroMisuse, ShapesMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const auto error = harness::error_of([&] {
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(
          std::vector<torch::Tensor>{torch::ones({3 + group.rank()})}, group, 0.1);
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.what(), HasSubstr("group 0 parameter 0"));
  });
}

// For example, a program may have taken the list from a hash map of pointers.
TEST(ZeroMisuse, DifferentOrderIsWarnedOf) {
  for (const bool is_swapped : {true, false}) {
    std::string logged;
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      const std::vector<torch::Tensor> one{torch::full({3}, 1.0), torch::full({4}, 2.0),
                                           torch::full({3}, 3.0)};
      const std::vector<torch::Tensor> other{one[2], one[1], one[0]};
      const bool is_other = is_swapped && group.rank() == 1;
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(is_other ? other : one, group, 0.1);
      harness::meet(group);
      if (group.rank() == 0) logged = harness::LogWatch::current().text();
    });
    const std::string warning = "group 0 parameter 0 of rank 1 does not have rank 0's values";
    if (is_swapped) {
      EXPECT_THAT(logged, HasSubstr(warning));
    } else {
      EXPECT_THAT(logged, ::testing::Not(HasSubstr("different parameters")));
    }
  }
}

TEST(ZeroMisuse, OptionsMustAgree) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    for (const std::size_t theirs : {std::size_t{16}, std::size_t{0}}) {
      const ZeroOptions options{.shard_bytes = group.rank() == 0 ? std::size_t{32} : theirs};
      const auto error = harness::error_of([&] {
        ZeroRedundancyOptimizer<torch::optim::SGD> zero(
            std::vector<torch::Tensor>{torch::ones({8})}, group, 0.1, options);
      });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), HasSubstr("ZeroOptions::shard_bytes"));
    }
  });
}

TEST(ZeroMisuse, OutsideChangesAreCallerErrors) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    Mlp net;
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group, 0.1,
                                                    {.parameters_as_bucket_view = true});
    zero.step();
    net->to(torch::kFloat);
    EXPECT_THAT(harness::error_of([&] { zero.step(); }).what(), HasSubstr("move the module first"));

    Mlp other;
    ZeroRedundancyOptimizer<torch::optim::SGD> grown(other->parameters(), group, 0.1);
    grown.add_parameters({torch::ones({1})});
    EXPECT_THAT(harness::error_of([&] { grown.step(); }).what(), HasSubstr("call add_param_group"));

    Mlp third;
    ZeroRedundancyOptimizer<torch::optim::SGD> referred(third->parameters(), group, 0.1);
    torch::optim::Optimizer& as_base = referred;
    as_base.add_param_group({{torch::ones({1})}});
    EXPECT_THAT(harness::error_of([&] { referred.step(); }).what(),
                HasSubstr("call add_param_group() of the ZeroRedundancyOptimizer itself"));

    const auto one = torch::ones({1});
    EXPECT_EQ(harness::error_of([&] {
                ZeroRedundancyOptimizer<torch::optim::SGD> twice(
                    std::vector<torch::Tensor>{one, one}, group, 0.1);
              }).blame(),
              Blame::Caller);
    EXPECT_THROW(
        ZeroRedundancyOptimizer<torch::optim::SGD>(std::vector<torch::Tensor>{one}, group, -1.0),
        std::exception);
  });
}

// Set for the rank that this thread is.
thread_local bool step_breaks = false;
struct Breaking : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    if (step_breaks) throw std::runtime_error("the step broke");
    return SGD::step(std::move(closure));
  }
};

TEST_P(Zero, ThrowingStepFailsOnAllRanks) {
  harness::run_ranks(GetParam(), 3, [](ProcessGroup group) {
    auto meeting = group.new_group({0, 1, 2});
    Mlp net;
    fill(net);
    ZeroRedundancyOptimizer<Breaking> zero(net->parameters(), group, torch::optim::SGDOptions(0.1),
                                           {.shard_bytes = 1});
    set_gradients(net->parameters(), 0);
    zero.step();
    meeting.barrier()
        .synchronize();  // an abort also ends operations that other ranks have not completed
    step_breaks = group.rank() == 1;
    if (group.rank() == 1) {
      try {
        zero.step();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "the step broke");
      }
    } else {
      const auto error = harness::error_of([&] { zero.step(); });
      EXPECT_EQ(error.blame(), Blame::Cancelled);
      EXPECT_THAT(error.what(), HasSubstr("rank 1"));
      EXPECT_THAT(error.what(),
                  HasSubstr("ZeroRedundancyOptimizer: the step there threw: the step broke"));
    }
    step_breaks = false;
    EXPECT_THAT(harness::error_of([&] { zero.step(); }).what(), HasSubstr("the step broke"))
        << "the group cannot be used any more";
  });
}

TEST_P(Zero, ClosureRunsOnceWithGradients) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    auto x = torch::ones({1}, torch::kDouble).requires_grad_();
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(std::vector<torch::Tensor>{x}, group, 0.5);
    int calls = 0;
    const torch::NoGradGuard no_grad;
    const auto loss = zero.step([&] {
      ++calls;
      auto value = x * 3;
      value.backward();
      return value;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(loss.item<double>(), 3);
    EXPECT_EQ(x.item<double>(), -0.5);
  });
}

// --- weft::join

// An Mlp with a parameter that no output depends on.
struct WithSpareImpl : MlpImpl {
  WithSpareImpl() : spare(register_parameter("spare", torch::ones({7}, torch::kDouble))) {}
  torch::Tensor spare;
};
TORCH_MODULE(WithSpare);

TEST_P(Zero, JoinedRankStepsItsOwnParameters) {
  for (const bool find_unused : {false, true}) {
    harness::run_ranks(GetParam(), 3, [&](ProcessGroup group) {
      WithSpare net;
      fill(net);
      WithSpare plain;
      fill(plain);
      net->spare.set_requires_grad(find_unused);
      DistributedDataParallel ddp(
          net, group,
          {.bucket_bytes = 100, .first_bucket_bytes = 1, .find_unused_parameters = find_unused});
      const auto options = torch::optim::AdamWOptions(0.05).weight_decay(0.1);
      ZeroRedundancyOptimizer<torch::optim::AdamW> zero(net->parameters(), group, options,
                                                        {.shard_bytes = 1});
      const int steps_of_rank[] = {2, 5, 0};
      // A rank that has run out steps its shards with the gradients that the others have clipped,
      // and with their learning rate.
      const auto clip = [](const auto& model) {
        torch::nn::utils::clip_grad_norm_(model->parameters(), 0.3);
      };
      const auto decay = [](torch::optim::Optimizer& optimizer) {
        auto& own = optimizer.param_groups().front().options();
        own.set_lr(0.8 * own.get_lr());
      };
      join({&ddp, &zero}, [&] {
        for (int step = 0; step < steps_of_rank[group.rank()]; ++step) {
          zero.zero_grad();
          ddp(random({2, 6}, static_cast<std::uint64_t>(10 * step + group.rank())))
              .sum()
              .backward();
          clip(net);
          zero.step();
          decay(zero);
        }
      });
      torch::optim::AdamW plain_optimizer(plain->parameters(), options);
      for (int step = 0; step < 5; ++step) {
        plain_optimizer.zero_grad();
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (int rank = 0; rank < 3; ++rank) {
          if (step >= steps_of_rank[rank]) continue;
          loss =
              loss + plain(random({2, 6}, static_cast<std::uint64_t>(10 * step + rank))).sum() / 3;
        }
        loss.backward();
        clip(plain);
        plain_optimizer.step();
        decay(plain_optimizer);
      }
      EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-9);
      EXPECT_TRUE(
          torch::equal(net->spare, plain->spare));  // no rank has a gradient, so there is no decay
    });
  }
}

// Step i of each rank uses parameter i % 2.
struct TakingTurnsImpl : torch::nn::Module {
  TakingTurnsImpl() {
    for (const char* name : {"even", "odd"})
      turns.push_back(register_parameter(name, torch::ones({3}, torch::kDouble)));
  }
  torch::Tensor forward(int step) {
    return turns[static_cast<std::size_t>(step % 2)] * (step + 1.0);
  }
  std::vector<torch::Tensor> turns;
};

TEST_P(Zero, JoinedRankSkipsUnusedParameters) {
  harness::run_ranks(GetParam(), 2, [&](ProcessGroup group) {
    auto net = std::make_shared<TakingTurnsImpl>();
    auto plain = std::make_shared<TakingTurnsImpl>();
    DistributedDataParallel<TakingTurnsImpl> ddp(net, group, {.find_unused_parameters = true});
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), group, options);
    torch::optim::SGD plain_optimizer(plain->parameters(), options);
    const int steps_of_rank[] = {1, 6};
    join({&ddp, &zero}, [&] {
      for (int step = 0; step < steps_of_rank[group.rank()]; ++step) {
        zero.zero_grad();
        ddp(step).pow(2).sum().backward();
        zero.step();
      }
    });
    for (int step = 0; step < 6; ++step) {
      plain_optimizer.zero_grad();
      (plain->forward(step).pow(2).sum() / (step < steps_of_rank[0] ? 1 : 2)).backward();
      plain_optimizer.step();
    }
    EXPECT_LT(difference(net->parameters(), plain->parameters()), 1e-12);
  });
}

}  // namespace
}  // namespace weft::testing
