// SPDX-License-Identifier: Apache-2.0
// Tests backward passes.
#include <map>
#include <mutex>
#include <thread>

#include <torch/types.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/call/core.h>
#include <weft/tests/engine/autograd/expected.h>

namespace passes {

using namespace weft;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor mul(at::Tensor a, at::Tensor b) { return a * b; }
at::Tensor matmul(at::Tensor a, at::Tensor b) { return a.matmul(b); }
at::Tensor chain(std::vector<at::Tensor> m) {
  return m[0].matmul(m[1]).matmul(m[2]).matmul(m[3]).matmul(m[4]);
}
at::Tensor branch(at::Tensor a, at::Tensor b) {
  if (!a.requires_grad() || b.requires_grad()) throw std::runtime_error("the flags did not travel");
  return a * b;
}
at::Tensor make(std::vector<std::int64_t> sizes) {
  return at::ones(sizes, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
}
at::Tensor add_held(at::Tensor a, RRef<at::Tensor> b) { return a + b.to_here(); }
// Calls a third worker, and uses its inputs again.
at::Tensor mixed(at::Tensor a, at::Tensor b, int third) {
  const at::Tensor there = rpc::this_agent().sync<&matmul>(third, a, b);
  return there * a + b;
}
// Two workers call each other `depth` times.
at::Tensor back_and_forth(at::Tensor a, at::Tensor b, int depth, int other) {
  if (depth == 0) return a * b;
  const int self = rpc::this_agent().self().rank;
  return rpc::this_agent().sync<&back_and_forth>(other, a * b, b, depth - 1, self) + a;
}
Future<at::Tensor> later(at::Tensor a, int other) {
  const at::Tensor there = co_await rpc::this_agent().async<&mul>(other, a, a);
  co_return there + a;
}
// Deferred replies, by the worker and its caller. Another call, made outside of the context,
// computes and sets the reply.
struct Deferred {
  at::Tensor a;
  Promise<at::Tensor> promise;
};
std::mutex deferred_mutex;
std::map<std::pair<int, int>, Deferred> deferred;
std::pair<int, int> here_and_caller() {
  return {rpc::this_agent().self().rank, rpc::this_call().caller.rank};
}
Future<at::Tensor> answered_later(at::Tensor a) {
  std::lock_guard lock(deferred_mutex);
  return (deferred[here_and_caller()] = {a, {}}).promise.future();
}
// Sets a deferred reply; false if there was none.
bool answer() {
  std::unique_lock lock(deferred_mutex);
  auto found = deferred.extract(here_and_caller());
  lock.unlock();
  if (found.empty()) return false;
  found.mapped().promise.set(found.mapped().a * found.mapped().a);
  return true;
}
// A continuation sets the reply after another call inside of the context.
Future<at::Tensor> answered_behind_a_call(at::Tensor a, int other) {
  const Promise<at::Tensor> promise;
  rpc::this_agent().async<&mul>(other, a, a).on_done([promise, a](const Future<at::Tensor>& there) {
    try {
      Future<at::Tensor> product = there;
      promise.set(product.get() * a);
    } catch (...) {
      promise.set_error(std::current_exception());
    }
  });
  return promise.future();
}
// One weight for all callers of this process.
at::Tensor& shared() {
  static at::Tensor weight = (make({3}).detach() * 2).requires_grad_();
  return weight;
}
at::Tensor scaled(at::Tensor x) { return x * shared(); }
RRef<at::Tensor> shared_reference() { return RRef<at::Tensor>(shared()); }
at::Tensor scaled_by(at::Tensor x, RRef<at::Tensor> weight) { return x * weight.to_here(); }
at::Tensor gradient_of_shared() { return AutogradContext::current().gradient(shared()); }
at::Tensor gradient_here(RRef<at::Tensor> parameter) {
  return AutogradContext::current().gradient(parameter.local_value());
}
std::size_t gradients_here() { return AutogradContext::current().gradients().size(); }
std::vector<std::size_t> counters() {
  const auto info = rpc::this_agent().debug_info();
  return {info.contexts, info.backward_passes};
}
struct Layer {
  Layer() : weight(make({3, 3})) {}
  at::Tensor forward(at::Tensor x) { return x.matmul(weight); }
  at::Tensor gradient() { return AutogradContext::current().gradient(weight); }
  bool grad_is_empty() { return !weight.grad().defined(); }
  at::Tensor weight;
};
}  // namespace passes

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

class Backward : public testing::TestWithParam<Setting> {};

TEST_P(Backward, RemoteOperationsGiveLocalGradients) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3}), b = leaf({3, 3});
    const auto plain = local_gradients([&] { return a * b; }, {a, b});
    for (int steps = 0; steps < 2; ++steps) {
      const auto to = after(agent, steps);
      for (int mode = 0; mode < 4; ++mode) {
        AutogradContext context(agent);
        at::Tensor product;
        if (mode == 0) product = agent.sync<&passes::mul>(to, a, b);
        if (mode == 1) product = agent.async<&passes::mul>(to, a, b).get();
        if (mode == 2) product = agent.remote<&passes::mul>(to, a, b).to_here();
        if (mode == 3) product = agent.sync_op("aten::mul", to, a, b);
        context.backward({product.sum()});
        expect_gradients(context, {a, b}, plain);
      }
    }
  });
}

TEST_P(Backward, WithoutCallsItIsLocalAutograd) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto a = leaf({3}), b = leaf({3});
    context.backward({(a + b).sum()});
    expect_gradients(context, {a, b}, {at::ones({3}, at::kDouble), at::ones({3}, at::kDouble)});
  });
}

TEST_P(Backward, CalleesLeafGetsItsGradientThere) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    const auto layer = agent.remote<passes::Layer>(to);
    const auto x = at::rand({2, 3}, at::kDouble);
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext context(agent);
      const at::Tensor y = called<&passes::Layer::forward>(way, layer, x);
      EXPECT_TRUE(y.requires_grad());
      context.backward({y.sum()});
      EXPECT_TRUE(context.gradients().empty());
      EXPECT_EQ(agent.sync<&passes::gradients_here>(to), 1u);
      EXPECT_TRUE(at::allclose(layer.sync<&passes::Layer::gradient>(),
                               x.sum(0).unsqueeze(1).expand({3, 3})));
      EXPECT_TRUE(layer.sync<&passes::Layer::grad_is_empty>());
    }
  });
}

TEST_P(Backward, GradFieldsStayUnchanged) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    (a * 3).sum().backward();
    AutogradContext context(agent);
    context.backward({agent.sync<&passes::mul>(after(agent, 1), a, b).sum()});
    EXPECT_TRUE(at::allclose(a.grad(), at::full({3}, 3.0, at::kDouble)));
    EXPECT_FALSE(b.grad().defined());
    EXPECT_TRUE(at::allclose(context.gradient(a), b.detach()));
  });
}

TEST_P(Backward, ReferencesGetGradientsAtTheOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int last = static_cast<int>(agent.workers().size()) - 1;
    for (const int steps : {1, last}) {
      AutogradContext context(agent);
      const auto owner = after(agent, 1);
      const auto held = agent.remote<&passes::make>(owner, std::vector<std::int64_t>{3});
      const auto x = leaf({3});
      const at::Tensor y = agent.sync<&passes::add_held>(after(agent, steps), x, held);
      context.backward({(y * 2).sum()});
      EXPECT_TRUE(at::allclose(context.gradient(x), at::full({3}, 2.0, at::kDouble)));
      EXPECT_EQ(context.gradients().size(), 1u);
      EXPECT_TRUE(at::allclose(agent.sync<&passes::gradient_here>(owner, held),
                               at::full({3}, 2.0, at::kDouble)));
    }
  });
}

TEST_P(Backward, SharedWeightHasGradientsPerContext) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto reference = agent.sync<&passes::shared_reference>(0);
    for (int round = 0; round < 6; ++round) {
      AutogradContext context(agent);
      const double factor = 1 + 10 * agent.self().rank + round;
      const auto x = leaf({3});
      const at::Tensor y = round % 2 == 0 ? agent.sync<&passes::scaled_by>(0, x, reference)
                                          : agent.sync<&passes::scaled>(0, x);
      context.backward({(y * factor).sum()});
      EXPECT_TRUE(at::allclose(context.gradient(x), at::full({3}, 2 * factor, at::kDouble)));
      EXPECT_TRUE(at::allclose(agent.sync<&passes::gradient_of_shared>(0), x.detach() * factor))
          << round;
    }
  });
}

TEST_P(Backward, CopiesSendGradientsToTheOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto owner = after(agent, 1);
    for (int steps = 0; steps < 3; ++steps) {
      AutogradContext context(agent);
      const auto there = after(agent, steps);
      const auto held = agent.remote<&passes::make>(owner, std::vector<std::int64_t>{3});
      const auto x = leaf({3});
      const at::Tensor y = agent.sync<&passes::add_held>(there, x, held.copy_to(there));
      context.backward({(y * 2).sum()});
      EXPECT_TRUE(at::allclose(context.gradient(x), at::full({3}, 2.0, at::kDouble)));
      EXPECT_TRUE(at::allclose(agent.sync<&passes::gradient_here>(owner, held),
                               at::full({3}, 2.0, at::kDouble)));
    }
  });
}

TEST_P(Backward, ManyRoundTripsGiveLocalGradients) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3}), b = leaf({3, 3});
    const auto c = at::rand({3, 3}, at::kDouble);
    const auto compute = [&](const auto& call) {
      at::Tensor x = call(1, a, b);
      x = call(2, x, c);
      x = call(3, x, a);
      x = call(1, c, x);
      x = call(2, x, b);
      return call(3, x, x);
    };
    AutogradContext context(agent);
    const at::Tensor y = compute([&](int steps, const at::Tensor& l, const at::Tensor& r) {
      return agent.sync<&passes::mul>(after(agent, steps), l, r);
    });
    context.backward({y.sum()});
    expect_gradients(
        context, {a, b},
        local_gradients(
            [&] {
              return compute([](int, const at::Tensor& l, const at::Tensor& r) { return l * r; });
            },
            {a, b}));
  });
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const std::vector<at::Tensor> m = {leaf({4, 6}), leaf({6, 5}), leaf({5, 7}), leaf({7, 8})};
    AutogradContext context(agent);
    at::Tensor y = m[0];
    for (int i = 1; i < 4; ++i)
      y = agent.sync<&passes::matmul>(after(agent, i), y, m[static_cast<std::size_t>(i)]);
    context.backward({y.sum()});
    expect_gradients(
        context, m,
        local_gradients([&] { return m[0].matmul(m[1]).matmul(m[2]).matmul(m[3]); }, m));
  });
}

TEST_P(Backward, WrongRootsHaveDistinctErrors) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto x = leaf({2});
    std::set<std::string> texts;
    const auto refused = [&](const std::vector<at::Tensor>& roots,
                             const BackwardOptions& options = {}) {
      const auto error = error_of([&] { context.backward(roots, options); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
      texts.insert(error.text());
    };
    refused({});
    refused({at::Tensor()});
    refused({at::ones({1})});
    refused({x * 2});
    refused({leaf({1})});
    refused({x * 2}, {.grad_outputs = {at::ones({3}, at::kDouble)}});
    refused({x * 2}, {.grad_outputs = {at::ones({2}, at::kDouble), at::ones({2}, at::kDouble)}});
    context.release();
    refused({x.sum()});
    EXPECT_EQ(texts.size(), 8u);
  });
}

TEST_P(Backward, SeveralRootsAndGivenGradientsAddUp) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    std::vector<at::Tensor> roots;
    for (int i = 0; i < 4; ++i)
      roots.push_back((agent.sync<&passes::mul>(after(agent, 1), a, b) * (i + 1)).sum());
    context.backward(roots);
    expect_gradients(context, {a, b}, {b.detach() * 10, a.detach() * 10});
    AutogradContext* first = &context;
    first->release();
    AutogradContext second(agent);
    const at::Tensor y = agent.sync<&passes::mul>(after(agent, 1), a, b);
    const at::Tensor given = at::rand({3}, at::kDouble);
    second.backward({y, y}, {.grad_outputs = {given, given * 2}});
    expect_gradients(second, {a, b}, {b.detach() * given * 3, a.detach() * given * 3});
  });
}

TEST_P(Backward, EachGradientHasItsOwnDtype) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto a = at::rand({3}, at::kFloat).requires_grad_(), b = leaf({3});
    context.backward({agent.sync<&passes::add>(after(agent, 1), a, b).sum()});
    EXPECT_TRUE(at::equal(context.gradient(a), at::ones({3}, at::kFloat)));
    EXPECT_EQ(context.gradient(a).scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(context.gradient(b), at::ones({3}, at::kDouble)));
    EXPECT_EQ(context.gradient(b).scalar_type(), at::kDouble);
  });
}

TEST_P(Backward, NestedCallsGiveLocalGradients) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const std::vector<at::Tensor> m = {leaf({3, 3}), leaf({3, 3}), leaf({3, 3}), leaf({3, 3}),
                                       leaf({3, 3})};
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext context(agent);
      context.backward({called<&passes::chain>(way, agent, after(agent, 1), m).sum()});
      expect_gradients(context, m, local_gradients([&] { return passes::chain(m); }, m));
    }
    const auto expected =
        local_gradients([&] { return m[0].matmul(m[1]) * m[0] + m[1]; }, {m[0], m[1]});
    for (const int third : {0, 2, 1}) {
      for (const auto way : kWays) {
        SCOPED_TRACE(name(way));
        AutogradContext context(agent);
        const int rank = after(agent, third).rank;
        context.backward(
            {called<&passes::mixed>(way, agent, after(agent, 1), m[0], m[1], rank).sum()});
        expect_gradients(context, {m[0], m[1]}, expected);
      }
    }
  });
}

TEST_P(Backward, CallbacksAndCoroutinesAreFollowed) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    {
      AutogradContext context(agent);
      const auto to = after(agent, 1);
      context.backward({agent.sync<&passes::back_and_forth>(to, a, b, 6, agent.self().rank).sum()});
      expect_gradients(context, {a, b},
                       local_gradients(
                           [&] {
                             at::Tensor x = a, sum = at::zeros({3}, at::kDouble);
                             for (int i = 0; i < 6; ++i) {
                               sum = sum + x;
                               x = x * b;
                             }
                             return x * b + sum;
                           },
                           {a, b}));
    }
    AutogradContext context(agent);
    context.backward({agent.sync<&passes::later>(after(agent, 1), a, after(agent, 2).rank).sum()});
    expect_gradients(context, {a}, {a.detach() * 2 + 1});
  });
}

TEST_P(Backward, DeferredRepliesKeepTheirContext) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3});
    for (int steps = 0; steps < 2; ++steps) {
      const auto to = after(agent, steps);
      AutogradContext context(agent);
      auto reply = agent.async<&passes::answered_later>(to, a);
      // From a thread without the context.
      std::thread([&] {
        EXPECT_TRUE(comes_true([&] { return agent.sync<&passes::answer>(to); }));
      }).join();
      context.backward({reply.get().sum()});
      expect_gradients(context, {a}, {a.detach() * 2});
    }
    for (int steps = 0; steps < 2; ++steps) {
      AutogradContext context(agent);
      const auto other = after(agent, steps + 1).rank;
      context.backward(
          {agent.sync<&passes::answered_behind_a_call>(after(agent, 1), a, other).sum()});
      expect_gradients(context, {a}, {a.detach() * a.detach() * 3});
    }
  });
}

TEST_P(Backward, RequiresGradTravels) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const auto a = leaf({3});
    const auto b = at::rand({3}, at::kDouble);
    context.backward({agent.sync<&passes::branch>(after(agent, 1), a, b).sum()});
    expect_gradients(context, {a}, {b});
  });
}

TEST_P(Backward, PassesOverARetainedGraphAddUp) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3}), b = leaf({3, 3});
    const auto once = local_gradients([&] { return a.matmul(b) * a + b; }, {a, b});
    AutogradContext context(agent);
    const at::Tensor loss =
        agent.sync<&passes::mixed>(after(agent, 1), a, b, after(agent, 2).rank).sum();
    for (int i = 1; i <= 3; ++i) {
      context.backward({loss}, {.retain_graph = i < 3});
      expect_gradients(context, {a, b}, {once[0] * i, once[1] * i});
    }
    // The last pass has freed the graph.
    EXPECT_EQ(error_of([&] { context.backward({loss}); }).blame(), Blame::Caller);
    context.release();
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext direct(agent);
      const at::Tensor product = called<&passes::mul>(way, agent, after(agent, 1), a, b).sum();
      for (int i = 1; i <= 2; ++i) {
        direct.backward({product}, {.retain_graph = true});
        expect_gradients(direct, {a, b}, {b.detach() * i, a.detach() * i});
      }
    }
  });
}

TEST_P(Backward, ThousandPassesAddUp) {
  if (GetParam().workers != 2) GTEST_SKIP() << "once for each transport";
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&passes::mul>(after(agent, 1), a, b).sum();
    for (int i = 0; i < 1000; ++i) context.backward({loss}, {.retain_graph = true});
    EXPECT_TRUE(at::allclose(context.gradient(a), b.detach() * 1000));
  });
}

TEST_P(Backward, CountersShowPassesAndContexts) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3});
    {
      AutogradContext context(agent);
      std::vector<std::size_t> seen, seen_there;
      const at::Tensor y = agent.sync<&passes::mul>(1, a, a);
      // When the gradient arrives, the pass runs here, and on worker 1 until it has the reply.
      a.register_hook([&](const at::Tensor&) {
        seen = {agent.debug_info().contexts, agent.debug_info().backward_passes};
        seen_there = agent.sync<&passes::counters>(1);
      });
      context.backward({y.sum()});
      EXPECT_EQ(seen, (std::vector<std::size_t>{1, 1}));
      EXPECT_EQ(seen_there, (std::vector<std::size_t>{1, 1}));
    }
    for (const auto& worker : agent.workers()) {
      EXPECT_TRUE(comes_true([&] {
        return agent.sync<&passes::counters>(worker) == std::vector<std::size_t>{0, 0};
      }));
    }
  });
}

TEST_P(Backward, ConcurrentPassesDoNotInterfere) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&agent, i] {
        for (int round = 0; round < 10; ++round) {
          const auto a = leaf({3, 3}), b = leaf({3, 3});
          AutogradContext context(agent);
          const at::Tensor loss =
              agent.sync<&passes::mixed>(after(agent, 1 + i % 2), a, b, after(agent, 1).rank).sum();
          context.backward({loss}, {.mode = i % 2 == 0 ? BackwardMode::Fast : BackwardMode::Exact});
          expect_gradients(context, {a, b},
                           local_gradients([&] { return a.matmul(b) * a + b; }, {a, b}));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_P(Backward, ExactIgnoresUnusedResults) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor unused = agent.sync<&passes::mul>(after(agent, 1), a, a);
    const at::Tensor used = agent.sync<&passes::mul>(after(agent, 1), a, b);
    const auto root = used.sum();
    for (int i = 1; i <= 3; ++i) {
      context.backward({root}, {.retain_graph = true, .mode = BackwardMode::Exact});
      expect_gradients(context, {a, b}, {b.detach() * i, a.detach() * i});
    }
    context.backward({unused.sum()}, {.mode = BackwardMode::Exact});
    expect_gradients(context, {a, b}, {b.detach() * 3 + a.detach() * 2, a.detach() * 3});
  });
}

TEST_P(Backward, FastTimeoutNamesExact) {
  rpc::Options options;
  options.timeout = 1s;
  if (GetParam().as == As::Processes) options.timeout = 3s;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto a = leaf({3}), b = leaf({3});
        AutogradContext context(agent);
        agent.sync<&passes::mul>(1, a, a);
        const at::Tensor used = agent.sync<&passes::mul>(1, a, b);
        const auto root = used.sum();
        const auto error = error_of([&] { context.backward({root}, {.retain_graph = true}); });
        EXPECT_EQ(error.blame(), Blame::Timeout);
        EXPECT_NE(error.text().find("Exact"), std::string::npos) << error.text();
        EXPECT_TRUE(context.gradients().empty());
        context.backward({root}, {.mode = BackwardMode::Exact});
        expect_gradients(context, {a, b}, {b.detach(), a.detach()});
      },
      options);
}

// The owner misses the gradient, and the root is the first to time out.
TEST_P(Backward, FastTimeoutOfAFetchNamesExact) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const RRef<at::Tensor> weight = agent.remote<&passes::make>(1, std::vector<std::int64_t>{3});
    AutogradContext context(agent);
    weight.to_here();
    const auto root = agent.sync<&passes::mul>(1, weight.to_here(), at::ones({3})).sum();
    agent.set_timeout(500ms);
    const auto error = error_of([&] { context.backward({root}, {.retain_graph = true}); });
    agent.set_timeout(60s);
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_NE(error.text().find("Exact"), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("rank 1"), std::string::npos) << error.text();
    context.backward({root}, {.mode = BackwardMode::Exact});
  });
}

TEST_P(Backward, ContextTakesSeveralPasses) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3, 3}), b = leaf({3, 3});
    const auto once = local_gradients([&] { return a.matmul(b) * a + b; }, {a, b});
    AutogradContext context(agent);
    for (int i = 1; i <= 3; ++i) {
      context.backward(
          {agent.sync<&passes::mixed>(after(agent, 1), a, b, after(agent, 2).rank).sum()});
      expect_gradients(context, {a, b}, {once[0] * i, once[1] * i});
    }
    EXPECT_TRUE(context.shared()->recording().all().empty());
  });
}

TEST_P(Backward, ProfilerSeesSendsAndReceives) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "one profiler sees all workers in one process";
  using Clock = std::chrono::steady_clock;
  static std::mutex mutex;
  static std::map<std::string, std::vector<Clock::time_point>> begun;
  begun.clear();
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function)
                                                           -> std::unique_ptr<at::ObserverContext> {
                              std::lock_guard lock(mutex);
                              begun[function.name()].push_back(Clock::now());
                              return nullptr;
                            }).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  Clock::time_point begin, end;
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    AutogradContext context(agent);
    const at::Tensor root = agent.sync<&passes::mul>(1, leaf({2}), leaf({2})).sum();
    begin = Clock::now();
    context.backward({root});
    end = Clock::now();
  });
  at::removeCallback(handle);
  // All of them lie within the pass, and each gradient arrives after it was sent.
  const auto received = begun["weft::RecvNode"], sent = begun["weft::SendNode"];
  ASSERT_EQ(received.size(), 2u);
  ASSERT_EQ(sent.size(), 2u);
  const std::vector<Clock::time_point> order = {begin,       received[0], sent[0],
                                                received[1], sent[1],     end};
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_P(Backward, LocalBackwardIsRefusedWithAdvice) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    const at::Tensor y = agent.sync<&passes::mul>(after(agent, 1), leaf({2}), leaf({2}));
    const auto error = error_of([&] { y.sum().backward(); });
    EXPECT_NE(std::string(error.what()).find("context.backward"), std::string::npos)
        << error.what();
  });
}

TEST_P(Backward, BackwardAsyncCanBeAwaited) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&passes::mul>(after(agent, 1), a, b).sum();
    context.backward_async({loss}, {.retain_graph = true}).get();
    context.backward_async({loss}, {.mode = BackwardMode::Exact}).get();
    expect_gradients(context, {a, b}, {b.detach() * 2, a.detach() * 2});
  });
}

TEST_P(Backward, AsyncPassFreesItsGraph) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::atomic<int> freed{0};
    std::vector<double> memory(3, 1.0);
    constexpr int kSteps = 3;
    for (int step = 0; step < kSteps; ++step) {
      const auto kept = at::from_blob(
          memory.data(), {3}, [&freed](void*) { ++freed; }, at::kDouble);
      const auto a = leaf({3});
      AutogradContext context(agent);
      const at::Tensor loss =
          agent.sync<&passes::mul>(after(agent, 1), a * kept, a).sum();  // its graph keeps `kept`
      auto pass = context.backward_async({loss});
      if (step > 0) pass.get();  // the first one is dropped, and ends with the context
    }
    EXPECT_TRUE(comes_true([&] { return freed == kSteps; })) << freed;
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, Backward, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
