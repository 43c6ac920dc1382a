// SPDX-License-Identifier: Apache-2.0
// zero_grad() drops the gradients that no_sync() has kept, as it does with
// DistributedDataParallel.
#include <cmath>
#include <functional>

#include <weft/training.h>

#include "two_ranks.h"

namespace weft::testing {
namespace {

// A sharded model with the same values at every call.
struct Trained {
  explicit Trained(const ProcessGroup& group) : sharded(filled_blocks(2), group) {}
  void backward(const torch::Tensor& x, bool quiet = false) {
    const auto local = sharded.no_sync(quiet);
    sharded(x).square().mean().backward();
  }
  FullyShardedDataParallel<nn::SequentialImpl> sharded;
  nn::SequentialImpl& net = *sharded.module();
};

struct Way {
  const char* name;
  std::function<void(nn::Module&, torch::optim::Optimizer&)> drop;
};
const std::vector<Way>& ways() {
  using torch::optim::Optimizer;
  static const std::vector<Way> all = {
      {"optimizer", [](nn::Module&, Optimizer& optimizer) { optimizer.zero_grad(); }},
      {"optimizer to zero", [](nn::Module&, Optimizer& optimizer) { optimizer.zero_grad(false); }},
      {"module", [](nn::Module& net, Optimizer&) { net.zero_grad(); }},
      {"module to zero", [](nn::Module& net, Optimizer&) { net.zero_grad(false); }},
      {"by hand", [](nn::Module& net, Optimizer&) {
         for (auto& shard : net.parameters()) shard.grad().zero_();
       }}};
  return all;
}

TEST(ShardedKeptGradients, ZeroGradDropsThem) {
  on_two_ranks([](ProcessGroup& group) {
    Trained clean(group);
    clean.backward(batch_of(group, 1));
    const auto expected = gradients(clean.net);
    for (const Way& way : ways()) {
      Trained trained(group);
      torch::optim::SGD optimizer(trained.net.parameters(), 0.1);
      trained.backward(torch::full({4, 8}, NAN), true);
      way.drop(trained.net, optimizer);
      trained.backward(batch_of(group, 1));
      EXPECT_TRUE(are_equal(gradients(trained.net), expected)) << way.name;
    }
  });
}

TEST(ShardedKeptGradients, ZeroGradBetweenForwardAndBackwardDropsThem) {
  on_two_ranks([](ProcessGroup& group) {
    Trained clean(group);
    clean.backward(batch_of(group, 1));
    for (const Way& way : ways()) {
      Trained trained(group);
      torch::optim::SGD optimizer(trained.net.parameters(), 0.1);
      trained.backward(batch_of(group, 2), true);
      const auto loss = trained.sharded(batch_of(group, 1)).square().mean();
      way.drop(trained.net, optimizer);
      loss.backward();
      EXPECT_TRUE(are_equal(gradients(trained.net), gradients(clean.net))) << way.name;
    }
  });
}

TEST(ShardedKeptGradients, ZeroGradWithinAnAccumulationBeginsItAnew) {
  on_two_ranks([](ProcessGroup& group) {
    Trained clean(group), trained(group);
    clean.backward(batch_of(group, 1), true);
    clean.backward(batch_of(group, 2));
    trained.backward(batch_of(group, 3), true);
    trained.net.zero_grad();
    trained.backward(batch_of(group, 1), true);
    trained.backward(batch_of(group, 2));
    EXPECT_TRUE(are_equal(gradients(trained.net), gradients(clean.net)));
  });
}

TEST(ShardedKeptGradients, OneOfTwoOptimizersDropsThoseOfItsParameters) {
  on_two_ranks([](ProcessGroup& group) {
    Trained one(group), two(group), trained(group);
    one.backward(batch_of(group, 1));
    two.backward(batch_of(group, 2), true);
    two.backward(batch_of(group, 1));
    torch::optim::SGD first(trained.net.ptr(0)->parameters(), 0.1);
    trained.backward(batch_of(group, 2), true);
    first.zero_grad();
    trained.backward(batch_of(group, 1));
    EXPECT_TRUE(are_equal(gradients(*trained.net.ptr(0)), gradients(*one.net.ptr(0))));
    EXPECT_TRUE(are_equal(gradients(*trained.net.ptr(1)), gradients(*two.net.ptr(1))));
  });
}

TEST(ShardedKeptGradients, AreAddedToTheGradientsThatShardsHave) {
  on_two_ranks([](ProcessGroup& group) {
    Trained trained(group), before(group), after(group);
    before.backward(batch_of(group, 1));
    after.backward(batch_of(group, 2), true);
    after.backward(batch_of(group, 3));
    trained.backward(batch_of(group, 1));
    trained.backward(batch_of(group, 2), true);
    EXPECT_TRUE(are_equal(gradients(trained.net), gradients(before.net)));
    trained.backward(batch_of(group, 3));
    auto expected = gradients(before.net);
    const auto added = gradients(after.net);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += added[i];
    EXPECT_TRUE(are_equal(gradients(trained.net), expected));
  });
}

TEST(ShardedKeptGradients, OfAFrozenParameterAreRefusedUntilTheyAreDropped) {
  on_two_ranks([](ProcessGroup& group) {
    Trained clean(group), trained(group);
    for (Trained* one : {&clean, &trained}) {
      if (one == &trained) one->backward(batch_of(group, 1), true);
      for (auto& shard : one->net.ptr(0)->parameters()) shard.set_requires_grad(false);
    }
    const Error failure = error_of([&] { trained.backward(batch_of(group, 2)); });
    EXPECT_EQ(failure.blame(), Blame::Caller);
    EXPECT_THAT(failure.text(), HasSubstr("'0.up.weight', whose gradient from no_sync()"));
    for (auto* one : {&clean, &trained}) {
      one->net.zero_grad();
      one->backward(batch_of(group, 2));
    }
    for (const auto& shard : trained.net.ptr(0)->parameters()) EXPECT_FALSE(shard.grad().defined());
    EXPECT_TRUE(are_equal(gradients(trained.net), gradients(clean.net)));
  });
}

TEST(ShardedKeptGradients, AreNotClippedAndNotUnscaled) {
  on_two_ranks([](ProcessGroup& group) {
    Trained trained(group);
    torch::optim::SGD optimizer(trained.net.parameters(), 0.1);
    GradScaler scaler;
    const auto clip = [&] { clip_grad_norm_(trained.net, 1.0); };
    const auto unscale = [&] { scaler.unscale_(optimizer); };
    scaler.scale(torch::ones({}));
    trained.backward(batch_of(group, 1), true);
    EXPECT_THAT(error_of(clip).text(), HasSubstr("clip_grad_norm_: no_sync() keeps gradients"));
    EXPECT_THAT(error_of(unscale).text(), HasSubstr("GradScaler: no_sync() keeps gradients"));
    trained.net.zero_grad(false);
    trained.backward(batch_of(group, 1));
    clip();
    unscale();
  });
}

// zero_grad() ends that at once.
TEST(ShardedKeptGradients, BesideAveragesAreNotClippedEither) {
  on_two_ranks([](ProcessGroup& group) {
    Trained trained(group);
    torch::optim::SGD optimizer(trained.net.parameters(), 0.1);
    GradScaler scaler;
    const auto clip = [&] { clip_grad_norm_(trained.net, 1.0); };
    const auto unscale = [&] { scaler.unscale_(optimizer); };
    scaler.scale(torch::ones({}));
    trained.backward(batch_of(group, 1));
    trained.backward(batch_of(group, 2), true);
    EXPECT_THAT(error_of(clip).text(), HasSubstr("clip_grad_norm_: no_sync() keeps gradients"));
    EXPECT_THAT(error_of(unscale).text(), HasSubstr("GradScaler: no_sync() keeps gradients"));
    trained.net.zero_grad(false);
    clip();
    unscale();
  });
}

// b runs inside of no_sync() only.
TEST(ShardedKeptGradients, CallTheHooksOfUnitsThatTheNextBackwardDoesNotUse) {
  on_two_ranks([](ProcessGroup& group) {
    auto model = std::make_shared<BranchesImpl>();
    FullyShardedDataParallel sharded(model, group);
    int calls = 0;
    model->b->parameters()[0].register_hook([&](const torch::Tensor& gradient) {
      if (!gradient.defined()) return torch::Tensor();  // of the backward inside of no_sync()
      ++calls;
      return torch::full_like(gradient, 7);
    });
    for (const bool uses_b : {true, false}) {
      const auto local = sharded.no_sync(uses_b);
      sharded(torch::ones({4, 8}), uses_b).backward();
    }
    EXPECT_EQ(calls, 1);
    const auto shard = model->b->parameters()[0];
    EXPECT_TRUE(torch::equal(shard.grad(), torch::full_like(shard, 7)));
  });
}

TEST(ShardedKeptGradients, LeaveNoneWhereNoRankHasBroughtOne) {
  on_two_ranks([](ProcessGroup& group) {
    auto model = std::make_shared<BranchesImpl>();
    FullyShardedDataParallel sharded(model, group);
    for (const bool quiet : {true, false}) {
      const auto local = sharded.no_sync(quiet);
      sharded(torch::ones({4, 8}), true, true).backward();
    }
    for (const auto& item : model->b->named_parameters())
      EXPECT_EQ(item.value().grad().defined(), item.key() == "down.weight") << item.key();
  });
}

}  // namespace
}  // namespace weft::testing
