// SPDX-License-Identifier: Apache-2.0
// Tests calls and references in autograd contexts.
#include <torch/nn/module.h>
#include <torch/types.h>

#include <weft/fully_shard.h>
#include <weft/tests/engine/autograd/settings.h>

namespace in_contexts {

using namespace weft;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor mul(at::Tensor a, at::Tensor b) { return a * b; }
at::Tensor matmul(at::Tensor a, at::Tensor b) { return a.matmul(b); }
// Runs a pass at the value's owner, in the context of the call.
void backward_of(RRef<at::Tensor> root) {
  AutogradContext::current().backward({root.local_value()}, {.retain_graph = true});
}
at::Tensor sum_of(at::Tensor a, at::Tensor b) { return (a * b).sum(); }
std::vector<std::size_t> all_counters() {
  const auto info = rpc::this_agent().debug_info();
  return {info.owner_rrefs, info.forks, info.pending_users, info.contexts, info.backward_passes};
}

// Its forward calls the next worker.
struct Calling : torch::nn::Module {
  explicit Calling(rpc::Agent caller)
      : agent(std::move(caller)),
        weight(register_parameter("weight", at::ones({3}, at::TensorOptions(at::kDouble)))) {}
  at::Tensor forward(at::Tensor x) {
    return agent.sync<&mul>(harness::after(agent, 1), x * weight, x);
  }
  const rpc::Agent agent;
  at::Tensor weight;
};

}  // namespace in_contexts

namespace weft {
namespace {

using namespace harness;

class InContexts : public testing::TestWithParam<Setting> {};

TEST_P(InContexts, OwnersValueMayBeARoot) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    const RRef<at::Tensor> plain(agent, (a * b).sum());
    plain.local_value().backward();  // libtorch's own
    EXPECT_TRUE(at::allclose(a.grad(), b.detach()));
    AutogradContext context(agent);
    const RRef<at::Tensor> root(agent, agent.sync<&in_contexts::mul>(after(agent, 1), a, b).sum());
    for (int times = 1; times <= 2; ++times) {
      context.backward({root.local_value()}, {.retain_graph = true});
      EXPECT_TRUE(at::allclose(context.gradient(a), b.detach() * times)) << times;
    }
    EXPECT_TRUE(at::allclose(a.grad(), b.detach())) << "it must not change";
    const RRef<at::Tensor> constant(agent, at::ones({1})), whole(agent, a * b);
    for (const auto& wrong : {constant, whole}) {
      EXPECT_EQ(error_of([&] { context.backward({wrong.local_value()}); }).blame(), Blame::Caller);
    }
  });
}

TEST_P(InContexts, CallsInCheckpointedAreRefused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto module = std::make_shared<in_contexts::Calling>(agent);
    const auto x = leaf({3});
    const at::Tensor loss = checkpointed(module, x).sum();
    const Error error = error_of([&] { context.backward({loss}); });
    EXPECT_NE(error.text().find("the result of a remote call"), std::string::npos) << error.text();
    EXPECT_TRUE(context.gradients().empty());
  });
}

TEST_P(InContexts, PassMayBeginAtTheOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto owner = after(agent, 1);
    const auto a = leaf({3}), b = leaf({3});
    {
      AutogradContext context(agent);
      const auto root = agent.remote<&in_contexts::sum_of>(owner, a, b);
      for (int times = 1; times <= 2; ++times) {
        agent.sync<&in_contexts::backward_of>(owner, root);
        EXPECT_TRUE(at::allclose(context.gradient(a), b.detach() * times)) << times;
        EXPECT_TRUE(at::allclose(context.gradient(b), a.detach() * times)) << times;
      }
      EXPECT_FALSE(a.grad().defined());
      // An unsuitable root at the owner is this call's error here.
      const auto product = agent.remote<&in_contexts::mul>(owner, a, b);
      const Error error = error_of([&] { agent.sync<&in_contexts::backward_of>(owner, product); });
      EXPECT_EQ(error.blame(), Blame::Remote);
      EXPECT_NE(error.text().find("grad_outputs"), std::string::npos) << error.text();
    }
    const auto root = agent.remote<&in_contexts::sum_of>(owner, a, b);
    const Error outside = error_of([&] { agent.sync<&in_contexts::backward_of>(owner, root); });
    EXPECT_NE(outside.text().find("context"), std::string::npos) << outside.text();
  });
}

TEST_P(InContexts, FailedOperationHarmsNoContext) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({2, 3}), b = leaf({5, 2});
    {
      AutogradContext context(agent);
      const auto to = after(agent, 1);
      EXPECT_EQ(error_of([&] { agent.sync<&in_contexts::matmul>(to, a, b); }).blame(),
                Blame::Remote);
      EXPECT_EQ(error_of([&] { agent.sync_op("aten::matmul", to, a, b); }).blame(), Blame::Remote);
      // The context goes on as if these calls had not been made.
      context.backward({agent.sync<&in_contexts::mul>(to, a, a).sum()});
      EXPECT_TRUE(at::allclose(context.gradient(a), 2 * a.detach()));
    }
    const auto own = [&] {
      const auto info = agent.debug_info();
      return info.backward_passes + info.calls_waiting;
    };
    EXPECT_TRUE(comes_true([&] { return own() == 0; }));
  });
}

TEST_P(InContexts, TrainingLoopLeavesNothingBehind) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    for (int iteration = 0; iteration < 30; ++iteration) {
      AutogradContext context(agent);
      at::Tensor sum = a;
      for (int i = 0; i < 6; ++i) sum = agent.sync<&in_contexts::add>(1, sum, b);
      const auto there = agent.remote<&in_contexts::mul>(1, sum, b);
      context.backward({there.to_here().sum()});
      EXPECT_TRUE(at::allclose(context.gradient(a), b.detach())) << iteration;
    }
    for (const auto& worker : agent.workers()) {
      EXPECT_TRUE(comes_true([&] {
        return agent.sync<&in_contexts::all_counters>(worker) == std::vector<std::size_t>(5, 0);
      })) << worker.name
          << ": " << at::ArrayRef<std::size_t>(agent.sync<&in_contexts::all_counters>(worker));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, InContexts, testing::ValuesIn(autograd_settings()),
                         setting_name);

}  // namespace
}  // namespace weft
