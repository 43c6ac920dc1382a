// SPDX-License-Identifier: Apache-2.0
// ZeroRedundancyOptimizer::overlap_with gives bit for bit the results of backward followed by
// step() and works while backward computes; if it fails on one rank, it fails on all.
#include <functional>
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "../ddp/models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A model with its wrapper and its optimizer. Two of them make the same steps, one with overlap and
// one without.
template <class Holder, class Optimizer>
struct Trainee {
  using Module = typename Holder::ContainedType;
  Trainee(const Holder& of, ProcessGroup& group, const DdpOptions& ddp_options,
          std::vector<torch::optim::OptimizerParamGroup> groups, const auto& options,
          ZeroOptions zero_options)
      : net(of),
        ddp(net, group, ddp_options),
        zero(std::move(groups), group, options, zero_options) {}
  void train(const torch::Tensor& x) { ddp(x).pow(2).sum().backward(); }
  Holder net;
  DistributedDataParallel<Module> ddp;
  ZeroRedundancyOptimizer<Optimizer> zero;
};

std::vector<torch::optim::OptimizerParamGroup> two_groups(const Mlp& net, double lr) {
  const auto all = net->parameters();
  return {
      {{all.begin(), all.begin() + 2}, std::make_unique<SGDOptions>(SGDOptions(lr).momentum(0.5))},
      {{all.begin() + 2, all.end()}}};
}

template <class Optimizer>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const Mlp& net) {
  if constexpr (std::is_same_v<Optimizer, SGD>) return two_groups(net, 0.05);
  return {torch::optim::OptimizerParamGroup(net->parameters())};
}

bool same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  bool all = a.size() == b.size();
  for (std::size_t i = 0; all && i < a.size(); ++i)
    all = a[i].defined() == b[i].defined() && (!a[i].defined() || torch::equal(a[i], b[i]));
  return all;
}

// Covers accumulated gradients, changing learning rates, and buckets that are rebuilt after the
// first pass.
template <class Optimizer, class Options>
void expect_the_same(ProcessGroup& group, const DdpOptions& ddp_options, ZeroOptions zero_options,
                     const Options& options,
                     const std::function<CommHook(ProcessGroup)>& hook = {}) {
  const auto make = [&] {
    Mlp net;
    fill(net);
    auto groups = groups_of<Optimizer>(net);
    return Trainee<Mlp, Optimizer>(net, group, ddp_options, std::move(groups), options,
                                   zero_options);
  };
  auto overlapped = make();
  auto plain = make();
  overlapped.zero.overlap_with(overlapped.ddp);
  torch::optim::StepLR overlapped_rate(overlapped.zero, 2, 0.5), plain_rate(plain.zero, 2, 0.5);
  if (hook) {
    overlapped.ddp.register_comm_hook(hook(group));
    plain.ddp.register_comm_hook(hook(group));
  }
  const auto step = [&](auto& one, auto& rate, std::uint64_t number) {
    const auto input = [&](std::uint64_t part) {
      return random({3, 6}, 100 * number + 10 * part + static_cast<std::uint64_t>(group.rank()));
    };
    if (number % 3 == 1) {
      const auto quiet = one.ddp.no_sync();
      one.train(input(1));
    }
    one.train(input(0));
    one.zero.step();
    if (number != 3) one.zero.zero_grad(/*set_to_none=*/number % 2 == 0);
    rate.step();
  };
  for (std::uint64_t number = 0; number < 6; ++number) {
    step(overlapped, overlapped_rate, number);
    step(plain, plain_rate, number);
    ASSERT_TRUE(same(overlapped.net->parameters(), plain.net->parameters())) << "step " << number;
    ASSERT_TRUE(same(gradients(*overlapped.net), gradients(*plain.net))) << "step " << number;
  }
}

class ZeroOverlap : public ::testing::TestWithParam<harness::As> {};
INSTANTIATE_TEST_SUITE_P(As, ZeroOverlap,
                         ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

constexpr DdpOptions kSmallBuckets{.bucket_bytes = 100, .first_bucket_bytes = 1};

TEST_P(ZeroOverlap, MatchesPlainStepsBitForBit) {
  for (const int ranks : {1, 2, 3}) {
    harness::run_ranks(GetParam(), ranks, [](ProcessGroup group) {
      for (const bool gradients_are_views : {true, false}) {
        for (const bool parameters_are_views : {true, false}) {
          for (const std::size_t shard_bytes : {1, 150}) {
            if (shard_bytes == 1 && group.size() != 2) continue;
            DdpOptions ddp_options = kSmallBuckets;
            ddp_options.gradient_as_bucket_view = gradients_are_views;
            const ZeroOptions zero_options{.shard_bytes = shard_bytes,
                                           .parameters_as_bucket_view = parameters_are_views};
            expect_the_same<SGD>(group, ddp_options, zero_options,
                                 SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
            expect_the_same<Adam>(group, ddp_options, zero_options, AdamOptions(0.01));
          }
        }
      }
      expect_the_same<FusedAdamW>(group, {}, {}, torch::optim::AdamWOptions(0.01));
    });
  }
}

TEST_P(ZeroOverlap, MatchesPlainStepsOverTransports) {
  for (const char* backend : {"shm", "tcp"}) {
    harness::run_ranks(GetParam(), 3,
                       [](ProcessGroup group) {
                         for (const bool as_view : {true, false}) {
                           expect_the_same<Adam>(
                               group, kSmallBuckets,
                               {.shard_bytes = 100, .parameters_as_bucket_view = as_view},
                               AdamOptions(0.01));
                         }
                       },
                       {.backend = backend});
  }
}

TEST_P(ZeroOverlap, UsesTheCommHooksResult) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    const auto fp16 = [](ProcessGroup of) { return comm_hooks::fp16_compress(std::move(of)); };
    const auto at_once = [](ProcessGroup) -> CommHook {
      return
          [](GradBucket& bucket) { return Future<at::Tensor>::ready(bucket.buffer() * 0 + 0.25); };
    };
    expect_the_same<Adam>(group, kSmallBuckets, {.shard_bytes = 100}, AdamOptions(0.01), fp16);
    expect_the_same<SGD>(group, kSmallBuckets, {.shard_bytes = 100}, SGDOptions(0.01).momentum(0.9),
                         at_once);
  });
}

// Rank 0 alone uses `sometimes`, and no rank `never`.
struct SparingImpl : MlpImpl {
  SparingImpl()
      : sometimes(register_module("sometimes", torch::nn::Linear(6, 3))),
        never(register_module("never", torch::nn::Linear(6, 3))) {
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x, bool uses_sometimes) {
    return uses_sometimes ? MlpImpl::forward(x) + sometimes(x) : MlpImpl::forward(x);
  }
  torch::nn::Linear sometimes, never;
};
TORCH_MODULE(Sparing);

TEST_P(ZeroOverlap, LeavesUnusedParametersAlone) {
  for (const bool static_graph : {false, true}) {
    harness::run_ranks(GetParam(), 2, [&](ProcessGroup group) {
      const auto options = AdamOptions(0.05).weight_decay(0.1);
      const auto make = [&] {
        Sparing net;
        fill(net);
        DdpOptions ddp_options = kSmallBuckets;
        ddp_options.find_unused_parameters = !static_graph;
        ddp_options.static_graph = static_graph;
        return Trainee<Sparing, Adam>(net, group, ddp_options,
                                      {torch::optim::OptimizerParamGroup(net->parameters())},
                                      options, {.shard_bytes = 100});
      };
      auto overlapped = make();
      auto plain = make();
      const auto before = overlapped.net->never->weight.detach().clone();
      overlapped.zero.overlap_with(overlapped.ddp);
      for (std::uint64_t step = 0; step < 4; ++step) {
        for (auto* one : {&overlapped, &plain}) {
          one->zero.zero_grad();
          one->ddp(random({3, 6}, 10 * step + static_cast<std::uint64_t>(group.rank())),
                   group.rank() == 0)
              .sum()
              .backward();
          one->zero.step();
        }
        ASSERT_TRUE(same(overlapped.net->parameters(), plain.net->parameters())) << "step " << step;
      }
      EXPECT_TRUE(torch::equal(overlapped.net->never->weight, before));
      EXPECT_FALSE(overlapped.net->never->weight.grad().defined());
    });
  }
}

struct WithTableImpl : torch::nn::Module {
  WithTableImpl()
      : first(register_module("first", torch::nn::Linear(3, 3))),
        table(register_module(
            "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)))),
        last(register_module("last", torch::nn::Linear(3, 2))),
        frozen(register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false)) {
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(first(table(x))) * frozen; }
  torch::nn::Linear first;
  torch::nn::Embedding table;
  torch::nn::Linear last;
  torch::Tensor frozen;
};
TORCH_MODULE(WithTable);

TEST_P(ZeroOverlap, StepsSparseAndFrozenParameters) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    const auto make = [&] {
      WithTable net;
      fill(net);
      return Trainee<WithTable, SGD>(net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1},
                                     {torch::optim::OptimizerParamGroup(net->parameters())},
                                     SGDOptions(0.1), {.shard_bytes = 1});
    };
    auto overlapped = make();
    auto plain = make();
    overlapped.zero.overlap_with(overlapped.ddp);
    for (std::int64_t step = 0; step < 3; ++step) {
      for (auto* one : {&overlapped, &plain}) {
        one->zero.zero_grad();
        one->train(torch::tensor({step, step + group.rank(), std::int64_t(7)}));
        one->zero.step();
      }
      ASSERT_TRUE(same(overlapped.net->parameters(), plain.net->parameters())) << "step " << step;
    }
  });
}

TEST_P(ZeroOverlap, StepsWhatIsFrozenLater) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    const auto make = [&] {
      Mlp net;
      fill(net);
      return Trainee<Mlp, SGD>(net, group, kSmallBuckets,
                               {torch::optim::OptimizerParamGroup(net->parameters())},
                               SGDOptions(0.1), {.shard_bytes = 1});
    };
    auto overlapped = make();
    auto plain = make();
    overlapped.zero.overlap_with(overlapped.ddp);
    for (std::uint64_t step = 0; step < 4; ++step) {
      for (auto* one : {&overlapped, &plain}) {
        one->net->parameters()[2].set_requires_grad(step % 2 == 0);
        one->zero.zero_grad();
        one->train(random({3, 6}, 10 * step + static_cast<std::uint64_t>(group.rank())));
        one->zero.step();
      }
      ASSERT_TRUE(same(overlapped.net->parameters(), plain.net->parameters())) << "step " << step;
    }
  });
}

TEST_P(ZeroOverlap, HandlesNoSyncAndAddedGroups) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    const auto make = [&] {
      Mlp net;
      fill(net);
      const auto all = net->parameters();
      return Trainee<Mlp, SGD>(net, group, kSmallBuckets,
                               {torch::optim::OptimizerParamGroup({all.begin() + 4, all.end()})},
                               SGDOptions(0.1), {.shard_bytes = 1});
    };
    auto overlapped = make();
    auto plain = make();
    overlapped.zero.overlap_with(overlapped.ddp);
    for (std::uint64_t step = 0; step < 4; ++step) {
      for (auto* one : {&overlapped, &plain}) {
        const auto all = one->net->parameters();
        if (step == 2) one->zero.add_param_group({{all.begin(), all.begin() + 4}});
        one->zero.zero_grad();
        if (step == 1) {
          const auto quiet = one->ddp.no_sync();
          one->train(random({3, 6}, 7));  // local gradients alone: nothing is stepped before step()
        } else {
          one->train(random({3, 6}, 10 * step + static_cast<std::uint64_t>(group.rank())));
        }
        one->zero.step();
      }
      ASSERT_TRUE(same(overlapped.net->parameters(), plain.net->parameters())) << "step " << step;
    }
  });
}

TEST_P(ZeroOverlap, WrapperOrOptimizerMayEndFirst) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    auto ddp = std::make_unique<DistributedDataParallel<MlpImpl>>(net, group, kSmallBuckets);
    {
      ZeroRedundancyOptimizer<SGD> gone(net->parameters(), group, SGDOptions(0.1));
      gone.overlap_with(*ddp);
      (*ddp)(random({2, 6}, 1)).sum().backward();
      gone.step();  // otherwise the work in progress would change parameters during the next pass
    }
    (*ddp)(random({2, 6}, 1)).sum().backward();
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, SGDOptions(0.1));
    zero.overlap_with(*ddp);
    zero.overlap_with(*ddp);  // a second call is allowed
    (*ddp)(random({2, 6}, 1)).sum().backward();
    ddp.reset();
    zero.step();
    zero.step();
  });
}

// --- concurrency

// If set, backward calls it on the thread of its rank.
thread_local std::function<void()> in_backward;
struct Here : torch::autograd::Function<Here> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    if (in_backward) in_backward();
    return gradients;
  }
};
struct StoppingImpl : MlpImpl {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(first(x));
    return third(torch::tanh(second(Here::apply(x))));
  }
};
TORCH_MODULE(Stopping);

TEST_P(ZeroOverlap, LateLayersUpdateDuringBackward) {
  for (const char* backend : {"gloo", "shm", "tcp"}) {
    for (const bool as_view : {true, false}) {
      harness::run_ranks(
          GetParam(), 2,
          [&](ProcessGroup group) {
            Stopping net;
            fill(net);
            DistributedDataParallel ddp(net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1});
            // With a larger shard_bytes, the owner of two parameters would have to wait for the
            // first layer's gradients.
            ZeroRedundancyOptimizer<SGD> zero(
                net->parameters(), group, SGDOptions(0.1),
                {.shard_bytes = 1, .parameters_as_bucket_view = as_view});
            zero.overlap_with(ddp);
            for (std::uint64_t step = 0; step < 3; ++step) {
              zero.zero_grad();
              auto& last = net->third->weight;
              const auto old_first = net->first->weight.detach().clone();
              const auto old_last = last.detach().clone();
              const auto version = last._version();
              bool came = false;
              torch::Tensor seen;
              in_backward = [&] {
                // The version rises once when the parameter may change from now on, once where a
                // broadcast writes the parameter itself, and once when it has changed.
                const int steps = as_view || zero.owner(last) == group.rank() ? 2 : 3;
                came = harness::comes_true([&] { return last._version() >= version + steps; });
                seen = last.detach().clone();
                EXPECT_TRUE(torch::equal(net->first->weight, old_first));
              };
              ddp(random({2, 6}, 10 * step + static_cast<std::uint64_t>(group.rank())))
                  .sum()
                  .backward();
              in_backward = nullptr;
              ASSERT_TRUE(came) << backend << ", step " << step;
              EXPECT_FALSE(torch::equal(seen, old_last));
              zero.step();
              EXPECT_TRUE(torch::equal(seen, last));
              EXPECT_FALSE(torch::equal(net->first->weight, old_first));
            }
          },
          {.backend = backend});
    }
  }
}

// Steps the third layer's weight only once the gate is open.
struct GatedStep : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    if (param_groups().front().params().front().sizes() == torch::IntArrayRef{3, 5}) opened.wait();
    return SGD::step(std::move(closure));
  }
  static std::shared_future<void> opened;
};
std::shared_future<void> GatedStep::opened;

TEST(ZeroOverlapOrder, StepDelaysNoBucketOrBackward) {
  for (const char* backend : {"gloo", "shm"}) {
    std::promise<void> gate;
    GatedStep::opened = gate.get_future();
    harness::run_ranks(
        harness::As::Threads, 2,
        [&](ProcessGroup group) {
          Mlp net;
          fill(net);
          DistributedDataParallel ddp(net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1});
          ZeroRedundancyOptimizer<GatedStep> zero(net->parameters(), group, SGDOptions(0.1),
                                                  {.shard_bytes = 1});
          zero.overlap_with(ddp);
          ddp.register_comm_hook([&, average = comm_hooks::all_reduce(group)](GradBucket& bucket) {
            const bool is_next = bucket.index() == 2;  // follows the third layer's bias and weight
            return average(bucket).then([&, is_next](at::Tensor averaged) {
              if (is_next && group.rank() == zero.owner(net->third->weight)) gate.set_value();
              return averaged;
            });
          });
          ddp(random({2, 6}, 1)).sum().backward();
          zero.step();
        },
        {.backend = backend});
  }
}

TEST(ZeroOverlapOrder, ReusedGraphFailsByItsVersions) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group, kSmallBuckets);
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, SGDOptions(0.1));
    zero.overlap_with(ddp);
    const auto loss = ddp(random({2, 6}, 1)).sum();
    loss.backward({}, /*retain_graph=*/true);
    try {
      loss.backward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
    }
    zero.step();
  });
}

// --- failures

// The step of the parameter with this many elements throws once its gradient is large.
std::int64_t breaking_elements = 0;
struct BreakingStep : SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    const auto& parameter = param_groups().front().params().front();
    if (parameter.numel() == breaking_elements && parameter.grad().abs().max().item<double>() > 1e6)
      throw std::out_of_range("the step broke");
    return SGD::step(std::move(closure));
  }
};

TEST_P(ZeroOverlap, ThrowingStepFailsOnAllRanks) {
  for (const bool in_the_middle : {true, false}) {
    breaking_elements =
        in_the_middle
            ? 15
            : 30;  // the third layer's weight, whose gradient is early; or the first layer's
    harness::run_ranks(GetParam(), 3, [&](ProcessGroup group) {
      auto meeting = group.new_group({0, 1, 2});
      Mlp net;
      fill(net);
      DistributedDataParallel ddp(net, group, kSmallBuckets);
      ZeroRedundancyOptimizer<BreakingStep> zero(net->parameters(), group, SGDOptions(1e-3),
                                                 {.shard_bytes = 1});
      zero.overlap_with(ddp);
      const auto step = [&](double scale) {
        (ddp(random({2, 6}, 1)).sum() * scale).backward();
        zero.step();
      };
      step(1);
      meeting.barrier()
          .synchronize();  // an abort also ends operations that other ranks have not completed
      const int owner = zero.owner(in_the_middle ? net->third->weight : net->first->weight);
      if (group.rank() == owner) {
        EXPECT_THROW(step(1e12), std::out_of_range);
      } else {
        const auto error = harness::error_of([&] { step(1e12); });
        EXPECT_EQ(error.blame(), Blame::Cancelled);
        EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(owner) + " aborted"));
        EXPECT_THAT(error.what(),
                    HasSubstr("ZeroRedundancyOptimizer: the step there threw: the step broke"));
      }
    });
  }
}

// Ranks 0 and 1 call this once they have their errors: neither may end, and be lost as well, before
// the other has its own error.
void stay_until_seen(const ProcessGroup& group) {
  const auto seen_by = [](int rank) { return "seen by " + std::to_string(rank); };
  group.store()->set(seen_by(group.rank()), std::vector<std::uint8_t>{1});
  if (group.rank() == 0) return group.store()->wait({seen_by(1)});
  try {
    group.store()->wait({seen_by(0)});
  } catch (const std::exception&) {  // rank 0 has its error and has ended, and the store with it
  }
}

TEST_P(ZeroOverlap, FailedHookEndsTheOtherRanks) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    Mlp net;
    fill(net);
    DistributedDataParallel ddp(net, group, kSmallBuckets);
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, SGDOptions(0.1),
                                      {.shard_bytes = 1});
    zero.overlap_with(ddp);
    ddp.register_comm_hook([&, average = comm_hooks::all_reduce(group)](GradBucket& bucket) {
      const bool fails = group.rank() == 1 && bucket.index() == 1;
      return average(bucket).then([fails](at::Tensor averaged) {
        if (fails) throw Error(Blame::Busy, "no room");
        return averaged;
      });
    });
    const auto error = harness::error_of([&] {
      ddp(random({2, 6}, 1)).sum().backward();
      zero.step();
    });
    EXPECT_THAT(error.what(), HasSubstr("no room"));
    EXPECT_EQ(error.blame(), group.rank() == 1 ? Blame::Busy : Blame::Cancelled);
    if (group.rank() == 0) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    }
    stay_until_seen(group);
  });
}

TEST_P(ZeroOverlap, RankLeavingInABackwardIsNamed) {
  harness::run_ranks(GetParam(), 3, [](ProcessGroup group) {
    Stopping net;
    fill(net);
    DistributedDataParallel ddp(net, group, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, SGDOptions(0.1),
                                      {.shard_bytes = 1});
    zero.overlap_with(ddp);
    const auto step = [&] {
      ddp(random({2, 6}, 1)).sum().backward();
      zero.step();
    };
    step();
    if (group.rank() == 2) {
      in_backward = [] { throw std::out_of_range("this rank breaks"); };
      EXPECT_THROW(step(), std::out_of_range);
      in_backward = nullptr;
      const auto error = harness::error_of([&] { zero.step(); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.what(), HasSubstr("go on from a checkpoint"));
      return;
    }
    const auto error = harness::error_of(step);
    EXPECT_EQ(error.blame(), Blame::PeerLost);
    EXPECT_THAT(error.what(), HasSubstr("rank 2"));
    stay_until_seen(group);
  });
}

// --- refusals

void expect_refused(const std::function<void()>& call, const std::string& text) {
  const auto error = harness::error_of(call);
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.what(), HasSubstr(text));
}

TEST(ZeroOverlapMisuse, MismatchedPairsAreRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    auto other_group = group.new_group({0, 1});
    Mlp net;
    Mlp other;
    DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer<SGD> of_other(other->parameters(), group, 0.1);
    ZeroRedundancyOptimizer<SGD> elsewhere(net->parameters(), other_group, 0.1);
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, 0.1);
    ZeroRedundancyOptimizer<SGD> second(net->parameters(), group, 0.1);
    expect_refused([&] { of_other.overlap_with(ddp); }, "its gradient is not averaged");
    expect_refused([&] { elsewhere.overlap_with(ddp); }, "make both with one");
    zero.overlap_with(ddp);
    expect_refused([&] { second.overlap_with(ddp); }, "another optimizer");
    ddp(random({2, 6}, 1)).sum().backward();
    zero.step();
  });
}

TEST(ZeroOverlapMisuse, CallsBeforeStepAreRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group, kSmallBuckets);
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, 0.1);
    zero.overlap_with(ddp);
    ddp(random({2, 6}, 1)).sum().backward();
    expect_refused([&] { ddp(random({2, 6}, 1)); }, "call step() first");
    expect_refused([&] { zero.consolidate_state_dict(); }, "call step() first");
    expect_refused([&] { zero.add_param_group({{torch::ones({1})}}); }, "call step() first");
    expect_refused([&] { zero.overlap_with(ddp); }, "call step() first");
    zero.step();
    zero.consolidate_state_dict();
    ddp(random({2, 6}, 1)).sum().backward();
    zero.step();
  });
}

TEST(ZeroOverlapMisuse, InsideJoinIsRefused) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net;
    DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer<SGD> zero(net->parameters(), group, 0.1);
    join(ddp, [&] {
      expect_refused([&] { zero.overlap_with(ddp); }, "cannot be called inside of weft::join");
    });
    zero.overlap_with(ddp);
    expect_refused([&] { join({&ddp, &zero}, [] {}); }, "leave out overlap_with");
    expect_refused([&] { join(zero, [] {}); }, "leave out overlap_with");
    join({&ddp, &zero},
         [&] {
           ddp(random({2, 6}, 1)).sum().backward(), zero.step();
         },
         {.enable = false});
  });
}

}  // namespace
}  // namespace weft::testing
