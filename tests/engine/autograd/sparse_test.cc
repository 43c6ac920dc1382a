// SPDX-License-Identifier: Apache-2.0
// Tests sparse tensors in remote calls and passes: recording, the end of contexts, references,
// dtypes, nested and mixed calls, and many passes.
#include <torch/autograd.h>
#include <torch/nn/modules/embedding.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/call/core.h>
#include <weft/tests/engine/autograd/settings.h>

namespace sparse {

using namespace weft;

at::Tensor make(at::ScalarType dtype) {
  const auto indices = at::tensor({0, 1, 1, 2}, at::kLong).view({2, 2});
  return at::sparse_coo_tensor(indices, at::rand({2}, at::kDouble) + 0.5, {3, 3})
      .to(dtype)
      .requires_grad_();
}
at::Tensor make_there(int dtype) { return make(static_cast<at::ScalarType>(dtype)); }
at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor add_on(at::Tensor a, at::Tensor b, int rank) {
  return rpc::this_agent().sync<&add>(rank, a, b) + a;
}
at::Tensor add_held(at::Tensor a, RRef<at::Tensor> b) { return a + b.to_here(); }
at::Tensor times_dense(at::Tensor a, at::Tensor dense) { return at::_sparse_mm(a, dense); }
at::Tensor only_first(at::Tensor a, at::Tensor b) {
  if (!a.requires_grad() || b.requires_grad()) throw std::runtime_error("the flags did not travel");
  return a + b;
}
at::Tensor gradient_here(RRef<at::Tensor> parameter) {
  return AutogradContext::current().gradient(parameter.local_value()).to_dense();
}
// A server's weight that all trainers use.
const at::Tensor& shared() {
  static const at::Tensor weight = make(at::kDouble);
  return weight;
}
RRef<at::Tensor> shared_reference() { return RRef<at::Tensor>(shared()); }
at::Tensor add_shared(at::Tensor a) { return a + shared(); }
at::Tensor gradient_of_shared() { return AutogradContext::current().gradient(shared()).to_dense(); }
std::size_t contexts() { return rpc::this_agent().debug_info().contexts; }
struct Embedding {
  Embedding() : bag(torch::nn::EmbeddingBagOptions(10, 3).mode(torch::kSum).sparse(true)) {
    torch::NoGradGuard off;
    bag->weight.copy_(at::arange(30).view({10, 3}));
  }
  at::Tensor forward(at::Tensor indices, at::Tensor offsets) {
    return bag->forward(indices, offsets);
  }
  at::Tensor gradient() { return AutogradContext::current().gradient(bag->weight); }
  torch::nn::EmbeddingBag bag;
};

}  // namespace sparse

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

class Sparse : public testing::TestWithParam<Setting> {};

at::Tensor sum_of(const at::Tensor& a) { return a.is_sparse() ? at::_sparse_sum(a) : a.sum(); }
at::Tensor dense(const at::Tensor& a) { return a.is_sparse() ? a.to_dense() : a; }

void expect_gradients(const AutogradContext& context, const std::function<at::Tensor()>& compute,
                      const std::vector<at::Tensor>& leaves, int passes = 1) {
  const auto expected = torch::autograd::grad({sum_of(compute())}, leaves);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor found = context.gradient(leaves[i]);
    ASSERT_TRUE(found.defined()) << i;
    EXPECT_EQ(found.scalar_type(), leaves[i].scalar_type());
    EXPECT_EQ(found.is_sparse(), expected[i].is_sparse()) << i;
    EXPECT_TRUE(at::allclose(dense(found), dense(expected[i]) * passes))
        << i << dense(found) << dense(expected[i]);
    EXPECT_FALSE(leaves[i].grad().defined());
  }
  EXPECT_EQ(context.gradients().size(), leaves.size());
}

TEST_P(Sparse, CallsGiveLocalGradients) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = sparse::make(at::kDouble), b = sparse::make(at::kDouble);
    for (int steps = 0; steps < 2; ++steps) {
      const auto to = after(agent, steps);
      for (int way = 0; way < 3; ++way) {
        AutogradContext context(agent);
        at::Tensor sum;
        if (way == 0) sum = agent.sync<&sparse::add>(to, a, b);
        if (way == 1) sum = agent.remote<&sparse::add>(to, a, b).to_here();
        if (way == 2) sum = agent.sync_op("aten::add", to, a, b);
        EXPECT_TRUE(sum.is_sparse());
        if (steps > 0) {
          EXPECT_EQ(sum.grad_fn()->name(), "weft::RecvNode");
          const auto sends = context.shared()->recording().all();
          ASSERT_EQ(sends.size(), 1u);
          ASSERT_EQ(sends[0]->num_outputs(), 2u);
          EXPECT_EQ(sends[0]->next_edge(0).function, torch::autograd::impl::grad_accumulator(a));
          EXPECT_EQ(sends[0]->next_edge(1).function, torch::autograd::impl::grad_accumulator(b));
        }
        context.backward({sum_of(sum)});
        expect_gradients(context, [&] { return a + b; }, {a, b});
      }
    }
  });
}

TEST_P(Sparse, ContextsEndEverywhere) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    {
      AutogradContext context(agent);
      const auto a = sparse::make(at::kDouble);
      agent.sync<&sparse::add_on>(1, a, a, static_cast<int>(agent.workers().size()) - 1);
      for (const auto& worker : agent.workers())
        EXPECT_EQ(agent.sync<&sparse::contexts>(worker), 1u) << worker.name;
    }
    for (const auto& worker : agent.workers()) {
      EXPECT_TRUE(comes_true([&] { return agent.sync<&sparse::contexts>(worker) == 0; }, 10s))
          << worker.name;
    }
  });
}

TEST_P(Sparse, ReferencesGetGradientsAtTheOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int last = static_cast<int>(agent.workers().size()) - 1;
    for (const int steps : {1, last}) {
      AutogradContext context(agent);
      const auto owner = after(agent, 1);
      const auto held = agent.remote<&sparse::make_there>(owner, static_cast<int>(at::kDouble));
      const auto a = sparse::make(at::kDouble);
      const at::Tensor sum = agent.sync<&sparse::add_held>(after(agent, steps), a, held);
      EXPECT_TRUE(sum.is_sparse());
      context.backward({sum_of(sum)});
      expect_gradients(context, [&] { return a + a.detach(); }, {a});
      EXPECT_TRUE(at::allclose(agent.sync<&sparse::gradient_here>(owner, held),
                               dense(context.gradient(a))));
    }
  });
}

TEST_P(Sparse, SharedWeightHasGradientsPerContext) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto weight = agent.sync<&sparse::shared_reference>(0);
    for (int round = 0; round < 6; ++round) {
      AutogradContext context(agent);
      const double factor = 1 + 10 * agent.self().rank + round;
      const auto a = sparse::make(at::kDouble);
      const at::Tensor sum = round % 2 == 0 ? agent.sync<&sparse::add_held>(0, a, weight)
                                            : agent.sync<&sparse::add_shared>(0, a);
      EXPECT_TRUE(sum.is_sparse());
      context.backward({sum_of(sum) * factor});
      const at::Tensor expected = (a.detach().to_dense() != 0).to(at::kDouble) * factor;
      EXPECT_TRUE(at::allclose(dense(context.gradient(a)), expected)) << round;
      EXPECT_TRUE(at::allclose(agent.sync<&sparse::gradient_of_shared>(0), expected)) << round;
    }
  });
}

TEST_P(Sparse, EachGradientHasItsOwnDtype) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = sparse::make(at::kFloat), b = sparse::make(at::kDouble);
    AutogradContext context(agent);
    context.backward({sum_of(agent.sync<&sparse::add>(after(agent, 1), a, b))});
    expect_gradients(context, [&] { return a + b; }, {a, b});
  });
}

TEST_P(Sparse, NestedAndPartlyNoGradCallsWork) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = sparse::make(at::kDouble), b = sparse::make(at::kDouble);
    for (const int third : {0, 1, 2}) {
      AutogradContext context(agent);
      context.backward(
          {sum_of(agent.sync<&sparse::add_on>(after(agent, 1), a, b, after(agent, third).rank))});
      expect_gradients(context, [&] { return a + b + a; }, {a, b});
    }
    AutogradContext context(agent);
    context.backward({sum_of(agent.sync<&sparse::only_first>(after(agent, 1), a, b.detach()))});
    expect_gradients(context, [&] { return a + b.detach(); }, {a});
  });
}

TEST_P(Sparse, MixesWithDenseTensors) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = sparse::make(at::kDouble), d = leaf({3, 2});
    AutogradContext context(agent);
    context.backward({agent.sync<&sparse::times_dense>(after(agent, 1), a, d).sum()});
    expect_gradients(context, [&] { return at::_sparse_mm(a, d); }, {a, d});
  });
}

TEST_P(Sparse, ThousandPassesAddUp) {
  if (GetParam().workers != 2) GTEST_SKIP() << "once for each transport";
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = sparse::make(at::kDouble), b = sparse::make(at::kDouble);
    AutogradContext context(agent);
    const at::Tensor root = sum_of(agent.sync<&sparse::add>(after(agent, 1), a, b));
    for (int i = 0; i < 1000; ++i) context.backward({root}, {.retain_graph = true});
    expect_gradients(
        context, [&] { return a + b; }, {a, b}, 1000);
  });
}

TEST_P(Sparse, RemoteEmbeddingGradientsAreSparse) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto embedding = agent.remote<sparse::Embedding>(after(agent, 1));
    const auto indices = at::tensor({1, 2, 4, 5, 4, 3}, at::kLong),
               offsets = at::tensor({0, 3}, at::kLong);
    const at::Tensor loss = embedding.sync<&sparse::Embedding::forward>(indices, offsets).sum();
    sparse::Embedding local;
    for (int i = 0; i < 2; ++i) {
      context.backward({loss}, {.retain_graph = true});
      local.forward(indices, offsets).sum().backward();
      const auto gradient = embedding.sync<&sparse::Embedding::gradient>();
      EXPECT_TRUE(gradient.is_sparse());
      EXPECT_TRUE(at::allclose(gradient.to_dense(), local.bag->weight.grad().to_dense()));
    }
  });
}

TEST_P(Sparse, TensorsTravelBothWays) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto sparse = [] {
      return at::sparse_coo_tensor(at::tensor({0, 2}, at::kLong).view({1, 2}),
                                   at::rand({2}, at::kDouble), {3}, at::kDouble)
          .requires_grad_();
    };
    const auto a = sparse(), b = sparse();
    AutogradContext context(agent);
    const at::Tensor sum = agent.sync<&sparse::add>(after(agent, 1), a, b);
    EXPECT_TRUE(sum.is_sparse());
    context.backward({at::_sparse_sum(sum)});
    EXPECT_TRUE(
        at::allclose(context.gradient(a).to_dense(), at::tensor({1.0, 0.0, 1.0}, at::kDouble)));
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, Sparse, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
