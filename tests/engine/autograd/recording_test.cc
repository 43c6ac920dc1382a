// SPDX-License-Identifier: Apache-2.0
// Tests contexts and the recording of calls in them.
#include <functional>
#include <map>
#include <thread>

#include <torch/types.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/numbers.h>
#include <weft/tests/engine/autograd/settings.h>

namespace recorded {

using namespace weft;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
// Each rank of `path` calls the next, by remote() or by sync(); the last adds.
at::Tensor add_along(std::vector<int> path, at::Tensor a, at::Tensor b, bool remote) {
  if (path.empty()) return a + b;
  const int next = path.front();
  path.erase(path.begin());
  rpc::Agent& agent = rpc::this_agent();
  return remote ? agent.remote<&add_along>(next, path, a, b, remote).to_here()
                : agent.sync<&add_along>(next, path, a, b, remote);
}
std::uint64_t context_here() { return AutogradContext::current().id(); }
Future<std::uint64_t> context_in_continuation(int rank) {
  return rpc::this_agent().async<&context_here>(rank).then(
      [](std::uint64_t there) { return AutogradContext::current().id() == there ? there : 0; });
}
Future<std::uint64_t> context_in_coroutine(int rank) {
  rpc::Agent& agent = rpc::this_agent();
  const auto first = co_await agent.async<&context_here>(rank);
  const auto second = co_await agent.async<&context_here>(rank);
  co_return first == second&& AutogradContext::current().id() == first ? first : 0;
}
std::uint64_t second_context() {
  AutogradContext second(rpc::this_agent());
  return second.id();
}
// Makes contexts one after another. True if everything that a called function may use still works.
bool two_after_each_other(int rank) {
  AutogradContext first(rpc::this_agent());
  first.release();
  AutogradContext second(rpc::this_agent());
  second.release();
  AutogradContext third(rpc::this_agent());
  RRef<int> held(7);
  return held.local_value() == 7 && AutogradContext::current().id() == third.id() &&
         rpc::this_call().caller.rank == rank &&
         rpc::this_agent().sync<&context_here>(rank) == third.id();
}
at::Tensor sum_of(std::vector<at::Tensor> all) {
  at::Tensor sum = all[0];
  for (std::size_t i = 1; i < all.size(); ++i) sum = sum + all[i];
  return sum;
}
bool knows(std::uint64_t context) {
  return autograd::contexts_of(*rpc::this_agent().shared_core()).find(context) != nullptr;
}
std::size_t contexts() { return rpc::this_agent().debug_info().contexts; }
int number(int value) { return value; }

// Describes the graph that this call's context recorded on this worker before the call. Receive
// nodes are numbered.
std::string graph() {
  const auto context = AutogradContext::current().shared();
  std::map<const torch::autograd::Node*, std::size_t> received;
  const auto named = [&](const torch::autograd::Node* node) {
    if (node->name() != "weft::RecvNode") return node->name();
    return "received " + std::to_string(received.try_emplace(node, received.size()).first->second);
  };
  std::string text;
  for (const auto& send : context->recording().all()) {
    text += "send to " + std::to_string(send->to()) + ":";
    for (const auto& edge : send->next_edges()) {
      text += " " + named(edge.function.get());
      for (const auto& next : edge.function->next_edges()) {
        if (next.is_valid())
          text += " <- " + named(next.function.get()) + "[" + std::to_string(next.input_nr) + "]";
      }
    }
    text += "\n";
  }
  return text;
}
std::vector<int> known_workers() {
  const auto workers = AutogradContext::current().shared()->recording().workers();
  return {workers.begin(), workers.end()};
}

}  // namespace recorded

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

// The time within which a context that has ended is gone everywhere.
constexpr auto kCleanUp = 10s;

class Recording : public testing::TestWithParam<Setting> {};

TEST_P(Recording, IdsBeginWithTheWorkersRank) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::uint64_t last = 0;
    for (int i = 0; i < 200; ++i) {
      std::uint64_t id = 0;
      {
        AutogradContext context(agent);
        id = context.id();
        EXPECT_EQ(AutogradContext::current().id(), id);
      }
      EXPECT_EQ(id >> 48, static_cast<std::uint64_t>(agent.self().rank));
      EXPECT_GT(id, last);
      last = id;
      EXPECT_EQ(error_of([] { AutogradContext::current(); }).blame(), Blame::Caller);
      EXPECT_EQ(autograd::contexts_of(*agent.shared_core()).find(id), nullptr);
    }
  });
}

TEST_P(Recording, ThreadHasOneContextAtATime) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    EXPECT_EQ(error_of([&] { AutogradContext second(agent); }).blame(), Blame::Caller);
    error_of([&] { agent.sync<&recorded::second_context>(after(agent, 1)); });
    EXPECT_EQ(AutogradContext::current().id(), context.id());
  });
}

TEST_P(Recording, CalleeMayHaveContextsInTurn) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_TRUE(agent.sync<&recorded::two_after_each_other>(after(agent, 1), agent.self().rank));
  });
}

TEST_P(Recording, ContextsFollowCallsAndContinuations) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    for (int steps = 0; steps < 3; ++steps) {
      const auto to = after(agent, steps);
      EXPECT_EQ(agent.sync<&recorded::context_here>(to), context.id());
      EXPECT_EQ(agent.sync<&recorded::context_in_continuation>(to, agent.self().rank),
                context.id());
      EXPECT_EQ(agent.sync<&recorded::context_in_coroutine>(to, after(agent, 1).rank),
                context.id());
      EXPECT_EQ(agent.remote<&recorded::context_here>(to).to_here(), context.id());
      const auto then = agent.async<&recorded::number>(to, 1).then(
          [](int) { return AutogradContext::current().id(); });
      EXPECT_EQ(then.get(), context.id());
    }
  });
}

TEST(AutogradIds, IdsWrapWithinTheirWorker) {
  EXPECT_EQ(call::number_of(3, (std::uint64_t{1} << 48) - 1),
            (std::uint64_t{3} << 48) + (std::uint64_t{1} << 48) - 1);
  EXPECT_EQ(call::number_of(3, std::uint64_t{1} << 48), std::uint64_t{3} << 48);
  EXPECT_EQ(call::number_of(65535, 7), std::uint64_t{0xffff000000000007});
}

TEST_P(Recording, CallIsRecordedOnBothSides) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    const std::vector<std::function<at::Tensor(at::Tensor, at::Tensor)>> ways = {
        [&](at::Tensor a, at::Tensor b) { return agent.sync<&recorded::add>(to, a, b); },
        [&](at::Tensor a, at::Tensor b) { return agent.async<&recorded::add>(to, a, b).get(); },
        [&](at::Tensor a, at::Tensor b) {
          return agent.remote<&recorded::add>(to, a, b).to_here();
        },
        [&](at::Tensor a, at::Tensor b) { return agent.sync_op("aten::add", to, a, b); },
        [&](at::Tensor a, at::Tensor b) {
          return agent.remote_op("aten::add", to, a, b).to_here();
        },
    };
    for (std::size_t way = 0; way < ways.size(); ++way) {
      SCOPED_TRACE(way);
      AutogradContext context(agent);
      const auto a = leaf({3}), b = leaf({3});
      const at::Tensor sum = ways[way](a, b);
      EXPECT_TRUE(at::equal(sum, a + b));
      EXPECT_TRUE(sum.requires_grad());
      EXPECT_FALSE(sum.is_leaf());
      EXPECT_EQ(sum.grad_fn()->name(), "weft::RecvNode");
      EXPECT_EQ(sum.grad_fn()->num_inputs(), 1u);
      const auto sends = context.shared()->recording().all();
      ASSERT_EQ(sends.size(), 1u);
      ASSERT_EQ(sends[0]->num_outputs(), 2u);
      EXPECT_EQ(sends[0]->next_edge(0).function, torch::autograd::impl::grad_accumulator(a));
      EXPECT_EQ(sends[0]->next_edge(1).function, torch::autograd::impl::grad_accumulator(b));
      EXPECT_EQ(agent.sync<&recorded::graph>(to),
                "send to " + std::to_string(agent.self().rank) +
                    ": AddBackward0 <- received 0[0] <- received 0[1]\n");
    }
  });
}

TEST_P(Recording, RelaysRecordSendsBothWays) {
  if (GetParam().workers < 4) GTEST_SKIP() << "three hops take four workers";
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    for (const bool remote : {false, true}) {
      SCOPED_TRACE(remote ? "remote" : "sync");
      AutogradContext context(agent);
      const auto a = leaf({2}), b = leaf({2});
      const std::vector<int> behind = {2, 3};
      const at::Tensor sum =
          remote ? agent.remote<&recorded::add_along>(1, behind, a, b, remote).to_here()
                 : agent.sync<&recorded::add_along>(1, behind, a, b, remote);
      EXPECT_EQ(sum.grad_fn()->name(), "weft::RecvNode");
      const auto sends = context.shared()->recording().all();
      ASSERT_EQ(sends.size(), 1u);
      EXPECT_EQ(sends[0]->to(), 1);
      EXPECT_EQ(sends[0]->next_edge(0).function, torch::autograd::impl::grad_accumulator(a));
      EXPECT_EQ(sends[0]->next_edge(1).function, torch::autograd::impl::grad_accumulator(b));
      // A relay sends its callee's result back and its caller's arguments on, in one message each.
      EXPECT_EQ(agent.sync<&recorded::graph>(1),
                "send to 0: received 0\nsend to 2: received 1 received 1\n");
      EXPECT_EQ(agent.sync<&recorded::graph>(2),
                "send to 1: received 0\nsend to 3: received 1 received 1\n");
      EXPECT_EQ(agent.sync<&recorded::graph>(3),
                "send to 2: AddBackward0 <- received 0[0] <- received 0[1]\n");
    }
  });
}

TEST_P(Recording, NoGradCallRecordsOnlyTheContext) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    const auto one = at::ones({2});
    for (const auto way : kWays) {
      SCOPED_TRACE(name(way));
      AutogradContext context(agent);
      const auto add = [&](const at::Tensor& a, const at::Tensor& b) {
        return called<&recorded::add>(way, agent, to, a, b);
      };
      EXPECT_FALSE(add(one, one).requires_grad());
      EXPECT_TRUE(context.shared()->recording().all().empty());
      // Asks from a thread without a context, because a call from inside would bring the context
      // along.
      std::thread([&] { EXPECT_TRUE(agent.sync<&recorded::knows>(to, context.id())); }).join();
      EXPECT_EQ(agent.sync<&recorded::graph>(to), "");
      EXPECT_GE(agent.sync<&recorded::contexts>(to), 1u);
      {
        const torch::NoGradGuard off;
        EXPECT_TRUE(add(leaf({2}), one).defined());
      }
      EXPECT_TRUE(context.shared()->recording().all().empty());
    }
  });
}

TEST_P(Recording, OnlyTensorsWithGradAreRecorded) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const bool remote : {false, true}) {
      AutogradContext context(agent);
      const auto to = after(agent, 1);
      std::vector<at::Tensor> all;
      for (int i = 0; i < 10; ++i)
        all.push_back(i % 2 == 0 ? leaf({2}) : at::ones({2}, at::kDouble));
      if (remote) {
        agent.remote<&recorded::sum_of>(to, all).to_here();
      } else {
        agent.sync<&recorded::sum_of>(to, all);
      }
      const auto sends = context.shared()->recording().all();
      ASSERT_EQ(sends.size(), 1u);
      ASSERT_EQ(sends[0]->num_outputs(), 5u);
      for (std::uint32_t i = 0; i < 5; ++i) {
        EXPECT_EQ(sends[0]->next_edge(i).function,
                  torch::autograd::impl::grad_accumulator(all[2 * i]));
      }
      EXPECT_EQ(context.shared()->recording().workers(), std::set<int>{to.rank});
    }
  });
}

TEST_P(Recording, AllCalledWorkersAreKnown) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const int what : {0, 1, 2}) {
      SCOPED_TRACE(what);
      AutogradContext context(agent);
      const auto a = what == 1 ? leaf({2}) : at::ones({2});
      std::set<int> called;
      for (const auto& worker : agent.workers()) {
        if (worker == agent.self()) continue;
        called.insert(worker.rank);
        if (what == 0) {
          agent.sync<&recorded::number>(worker, 1);
        } else {
          agent.sync<&recorded::add>(worker, a, a);
        }
      }
      EXPECT_EQ(context.shared()->recording().workers(), called);
    }
  });
}

TEST_P(Recording, LeavingTheScopeEndsItEverywhere) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    for (const int what : {0, 1, 2}) {
      {
        AutogradContext context(agent);
        const auto a = what == 0 ? leaf({2}) : at::ones({2});
        const int last = static_cast<int>(agent.workers().size()) - 1;
        if (what < 2) {
          // The last worker knows the context through worker 1 only.
          agent.sync<&recorded::add_along>(1, std::vector<int>{last}, a, a, false);
        } else {
          agent.sync<&recorded::number>(last, 1);
        }
        EXPECT_EQ(agent.debug_info().contexts, 1u);
        EXPECT_EQ(agent.sync<&recorded::contexts>(last), 1u);
      }
      EXPECT_EQ(agent.debug_info().contexts, 0u);
      for (const auto& worker : agent.workers()) {
        EXPECT_TRUE(
            comes_true([&] { return agent.sync<&recorded::contexts>(worker) == 0; }, kCleanUp))
            << worker.name;
      }
    }
  });
}

// Attempts go on after those for which a caller waits. Otherwise the other worker would keep the
// context as long as it sees this worker.
TEST_P(Recording, CleanUpIsRetriedUntilItIsHeard) {
  rpc::Options options;
  options.faults.fail_first[rpc::MessageKind::ContextCleanup] = 7;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        {
          AutogradContext context(agent);
          agent.sync<&recorded::number>(1, 1);
        }
        EXPECT_TRUE(comes_true([&] { return agent.sync<&recorded::contexts>(1) == 0; }, kCleanUp));
      },
      options);
}

TEST_P(Recording, LateCallRevivesNoContext) {
  rpc::Options options;
  options.faults.delay[rpc::MessageKind::Call] = std::chrono::milliseconds(50);
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        Future<int> late;
        {
          AutogradContext context(agent);
          late = agent.async<&recorded::number>(1, 1);
        }
        late.get();
        EXPECT_TRUE(comes_true([&] { return agent.sync<&recorded::contexts>(1) == 0; }, kCleanUp));
      },
      options);
}

TEST_P(Recording, ReleaseWorksFromAnyThread) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    AutogradContext context(agent);
    agent.sync<&recorded::number>(after(agent, 1), 1);
    std::thread([&] { context.release(); }).join();
    context.release();
    const auto id = std::to_string(context.id() & ((std::uint64_t{1} << 48) - 1));
    const auto x = leaf({1});
    const auto error = error_of([&] { context.backward({x * 2}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find(id), std::string::npos) << error.text();
    EXPECT_EQ(error_of([&] { context.gradients(); }).blame(), Blame::Caller);
    EXPECT_EQ(error_of([&] { AutogradContext::current(); }).blame(), Blame::Caller);
    // The thread may have another context now.
    AutogradContext next(agent);
    EXPECT_EQ(AutogradContext::current().id(), next.id());
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, Recording, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
