// SPDX-License-Identifier: Apache-2.0
// Tests tensors that were sent and lead to no root, and undefined gradients.
#include <weft/engine/autograd/messages.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/tests/engine/autograd/expected.h>

namespace unused {

using namespace weft;

at::Tensor stack(at::Tensor a, at::Tensor b, at::Tensor c) { return at::stack({a, b, c}); }
at::Tensor matmul(at::Tensor a, at::Tensor b) { return a.matmul(b); }
at::Tensor first_by_last(at::Tensor a, at::Tensor, at::Tensor c) { return a.matmul(c); }
std::vector<at::Tensor> split(at::Tensor a) { return a.split(1); }
// Two weights of this process, for all callers.
std::vector<at::Tensor>& weights() {
  static std::vector<at::Tensor> both = {harness::leaf({3}), harness::leaf({3})};
  return both;
}
std::vector<at::Tensor> take_weights() { return weights(); }
std::vector<at::Tensor> gradients_of_weights() {
  std::vector<at::Tensor> all;
  for (const at::Tensor& weight : weights())
    all.push_back(AutogradContext::current().gradient(weight));
  return all;
}

}  // namespace unused

namespace weft {
namespace {

using namespace harness;

class Unused : public testing::TestWithParam<Setting> {};

TEST_P(Unused, NarrowedAwayTensorHasZeroGradient) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3}), b = leaf({3, 3}), c = leaf({3, 3});
    const auto expected = local_gradients([&] { return a.matmul(c); }, {a, c});
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext context(agent);
      const at::Tensor all = called<&unused::stack>(way, agent, after(agent, 1), a, b, c);
      const at::Tensor product = called<&unused::matmul>(way, agent, after(agent, 2),
                                                         all.narrow(0, 0, 1), all.narrow(0, 2, 1));
      context.backward({product.sum()});
      expect_gradients(context, {a, b, c},
                       {expected[0], at::zeros({3, 3}, at::kDouble), expected[1]});
    }
  });
}

TEST_P(Unused, UnusedArgumentHasNoGradient) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3}), b = leaf({3, 3}), c = leaf({3, 3});
    const auto expected = local_gradients([&] { return a.matmul(c); }, {a, c});
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext context(agent);
      context.backward(
          {called<&unused::first_by_last>(way, agent, after(agent, 1), a, b, c).sum()});
      expect_gradients(context, {a, b, c}, {expected[0], at::Tensor(), expected[1]});
    }
  });
}

TEST_P(Unused, SomeResultsMayBeUnused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3});
    const auto expected = local_gradients(
        [&] {
          const auto own = a.split(1);
          return own[0] * own[2];
        },
        {a});
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext context(agent);
      const auto parts = called<&unused::split>(way, agent, after(agent, 1), a);
      context.backward({(parts[0] * parts[2]).sum()});
      expect_gradients(context, {a}, expected);
    }
  });
}

// Sends the gradients of a message by hand, for the node that sent it and no other.
TEST_P(Unused, SendNodeGradientsReachTheirInputs) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const at::Tensor one = at::rand({3}, at::kDouble), other = at::rand({3}, at::kDouble);
    for (const bool both : {true, false}) {
      AutogradContext context(agent);
      const auto received = agent.sync<&unused::take_weights>(1);
      const auto* node = dynamic_cast<const autograd::RecvNode*>(received[0].grad_fn().get());
      ASSERT_NE(node, nullptr);
      ASSERT_EQ(received[1].grad_fn().get(), node) << "both arrived in one message";
      const autograd::PassName pass{.context = context.id(), .pass = 1 << 20, .retain_graph = true};
      const auto outcome = agent.sync<&autograd::internal::gradient>(
          1, autograd::GradientMessage{pass, node->message(), {one, both ? other : at::Tensor()}});
      EXPECT_FALSE(outcome.failed()) << outcome.text;
      const auto found = agent.sync<&unused::gradients_of_weights>(1);
      EXPECT_TRUE(at::equal(found[0], one));
      ASSERT_EQ(found[1].defined(), both);
      if (both) {
        EXPECT_TRUE(at::equal(found[1], other));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, Unused, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
