// SPDX-License-Identifier: Apache-2.0
// BackwardMode::Exact first asks which messages lead to the roots. Tests that a failure in that
// round ends the pass as a later failure does.
#include <csignal>
#include <memory>
#include <optional>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/tensor/torch_releases.h>
#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>
#include <weft/transport/inproc/faults.h>

namespace asked {

using namespace weft;

struct Throwing : torch::autograd::Function<Throwing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("the node broke");
  }
};
at::Tensor twice(at::Tensor a) { return a * 2; }
at::Tensor breaks(at::Tensor a) { return Throwing::apply(a); }
at::Tensor twice_on(at::Tensor a, int rank) { return rpc::this_agent().sync<&twice>(rank, a) * 2; }
at::Tensor breaks_on(at::Tensor a, int rank) {
  return rpc::this_agent().sync<&breaks>(rank, a) * 2;
}
std::size_t passes_here() { return rpc::this_agent().debug_info().backward_passes; }
std::size_t plans_here() { return AutogradContext::current().shared()->passes().plans(); }
std::size_t gradients_here() { return AutogradContext::current().gradients().size(); }
// Releases the context without telling other workers.
void release_here() { AutogradContext::current().shared()->release("the test says so"); }
at::Tensor make() {
  return at::zeros({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
}
int number(int value) { return value; }
bool reaches(int rank) {
  try {
    rpc::this_agent().sync<&number>(rank, 1);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace asked

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

constexpr BackwardOptions kExact{.mode = BackwardMode::Exact};
const BackwardOptions kExactAgain{.retain_graph = true, .mode = BackwardMode::Exact};

void expect_in(const Error& error, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    EXPECT_NE(error.text().find(part), std::string::npos) << part << " in " << error.text();
}

class ExactBackward : public testing::TestWithParam<Setting> {};

TEST_P(ExactBackward, NodesErrorNamesWorkerAndNode) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    const auto a = leaf({3});
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&asked::breaks_on>(1, a, last).sum();
    const auto error = error_of([&] { context.backward({loss}, kExact); });
    EXPECT_EQ(error.blame(), Blame::Remote);
    expect_in(error, {"the node broke", "Throwing", agent.worker(last).name + " (rank"});
    for (const auto& worker : agent.workers()) {
      EXPECT_EQ(agent.sync<&asked::gradients_here>(worker), 0U) << worker.name;
      EXPECT_EQ(agent.sync<&asked::passes_here>(worker), 0U) << worker.name;
    }
  });
}

// It is the caller's mistake, whichever worker notices it.
TEST_P(ExactBackward, FreedGraphErrorSaysWhatFreedIt) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    const auto a = leaf({3});
    for (const auto mode : {BackwardMode::Exact, BackwardMode::Fast}) {
      for (const bool is_remote : {true, false}) {
        AutogradContext context(agent);
        const at::Tensor loss =
            (is_remote ? agent.sync<&asked::twice_on>(1, a, last) : a * a).sum();
        context.backward({loss}, {.mode = mode});
        const at::Tensor gradient = context.gradient(a).clone();
        const auto error = error_of([&] { context.backward({loss}, {.mode = mode}); });
        EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
        expect_in(error,
                  {"backward in context", is_remote ? "an earlier backward has freed this graph"
                                                    : "through the graph a second time"});
        EXPECT_EQ(agent.debug_info().backward_passes, 0U);
        EXPECT_TRUE(at::equal(context.gradient(a), gradient));
      }
    }
  });
}

TEST_P(ExactBackward, ReleasedContextCancelsThePass) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    for (const auto mode : {BackwardMode::Exact, BackwardMode::Fast}) {
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&asked::twice>(1, leaf({3})).sum();
      agent.sync<&asked::release_here>(1);
      const auto error = error_of([&] { context.backward({loss}, {.mode = mode}); });
      EXPECT_EQ(error.blame(), Blame::Cancelled);
      expect_in(error, {"backward in context", "worker1 (rank 1) has released the context"});
    }
  });
}

TEST_P(ExactBackward, PlanIsKeptWhileItMayBeReused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    const auto a = leaf({3});
    AutogradContext context(agent);
    const auto expect_plans = [&](std::size_t plans) {
      for (const int rank : {1, last})
        EXPECT_EQ(agent.sync<&asked::plans_here>(rank), plans) << rank;
    };
    for (int pass = 0; pass < 3; ++pass) {
      context.backward({agent.sync<&asked::twice_on>(1, a, last).sum()}, kExact);
      expect_plans(0);
    }
    error_of([&] { context.backward({agent.sync<&asked::breaks_on>(1, a, last).sum()}, kExact); });
    expect_plans(0);
    const at::Tensor loss = agent.sync<&asked::twice_on>(1, a, last).sum();
    context.backward({loss}, kExactAgain);
    context.backward({loss}, kExactAgain);
    expect_plans(1);
    context.backward({loss}, kExact);
    expect_plans(0);
    EXPECT_TRUE(at::equal(context.gradient(a), at::full({3}, 24.0, at::kDouble)));
  });
}

// Neither the plan nor, at the root, the graph remains, although each pass asked to retain it.
TEST_P(ExactBackward, EndedOrFailedPlanLeavesNothing) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    const auto a = leaf({3});
    AutogradContext context(agent);
    const auto expect_no_plans = [&](const char* when) {
      EXPECT_EQ(context.shared()->passes().plans(), 0U) << when;
      for (const int rank : {1, last}) {
        EXPECT_TRUE(comes_true([&] { return agent.sync<&asked::plans_here>(rank) == 0; }))
            << when << rank;
      }
    };
    std::optional<WeakNodePtr<torch::autograd::Node>> graph;
    {
      const at::Tensor loss = agent.sync<&asked::twice_on>(1, a, last).sum();
      graph.emplace(loss.grad_fn());
      for (int pass = 0; pass < 3; ++pass) context.backward({loss}, kExactAgain);
      context.backward({loss}, kExact);
      expect_no_plans("its last pass has ended");
      // This one fails in the round, because worker 1 has freed its part.
      error_of([&] { context.backward({loss}, kExactAgain); });
      expect_no_plans("the round has failed");
    }
    EXPECT_TRUE(comes_true([&] { return graph->expired(); }));
    {
      const at::Tensor loss = agent.sync<&asked::breaks_on>(1, a, last).sum();
      graph.emplace(loss.grad_fn());
      error_of([&] { context.backward({loss}, kExactAgain); });
      expect_no_plans("a node has failed");
    }
    EXPECT_TRUE(comes_true([&] { return graph->expired(); }));
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, ExactBackward, testing::ValuesIn(autograd_settings()),
                         setting_name);

// The link holds worker 1's answer, so the round lasts as long as the test wants.
TEST(ExactBackwardOnAHeldLink, ReleaseInTheRoundCancelsThePass) {
  static std::mutex mutex;
  static std::vector<transport::inproc::Faults> backs;
  backs.clear();
  transport::inproc::on_link([](const auto&, const auto& back) {
    std::lock_guard lock(mutex);
    backs.push_back(back);
  });
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto parameter = agent.remote<&asked::make>(1);
    const DistributedOptimizer<torch::optim::SGD> optimizer({parameter},
                                                            torch::optim::SGDOptions(1.0));
    AutogradContext context(agent);
    const at::Tensor loss = parameter.to_here().sum();
    const auto held = [] {
      std::lock_guard lock(mutex);
      return backs;
    }();
    for (const auto& back : held) back.hold_at(back.written());
    const auto pass = context.backward_async({loss}, kExact);
    const auto step = optimizer.step_async(context);
    EXPECT_EQ(agent.debug_info().backward_passes, 1U);
    EXPECT_FALSE(pass.done());
    context.release();
    EXPECT_EQ(agent.debug_info().backward_passes, 0U);
    for (const auto& back : held) back.release();
    EXPECT_EQ(error_of([&] { pass.get(); }).blame(), Blame::Cancelled);
    const auto error = error_of([&] { step.get(); });
    EXPECT_EQ(error.blame(), Blame::Cancelled);
    expect_in(error, {"the optimizer's step", "it was released"});
    EXPECT_TRUE(at::equal(parameter.to_here(), at::zeros({3}, at::kDouble)));
  });
  transport::inproc::on_link({});
}

TEST(ExactBackwardMessages, MissingAnswerTimeoutNamesTheRound) {
  static std::atomic<bool> ended;
  ended = false;
  rpc::Options options;
  options.timeout = 1500ms;
  options.faults.drop.insert(rpc::MessageKind::Backward);
  run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank == 0) {
          AutogradContext context(agent);
          const at::Tensor loss = agent.sync<&asked::twice>(1, leaf({3})).sum();
          const auto error = error_of([&] { context.backward({loss}, kExact); });
          EXPECT_EQ(error.blame(), Blame::Timeout);
          expect_in(error, {"backward in context", "which messages lead to the roots"});
          EXPECT_EQ(agent.debug_info().backward_passes, 0U);
          ended = true;
        }
        EXPECT_TRUE(comes_true([] { return ended.load(); }, 60s));
        agent.leave();
      },
      options);
}

// Worker 0 calls 1, which calls 2. Worker 2 is gone, and 0 hears of it from 1.
void expect_lost(rpc::Agent& agent, const at::Tensor& loss, AutogradContext& context) {
  const auto error = error_of([&] { context.backward({loss}, kExactAgain); });
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
  expect_in(error, {"backward in context", "worker2 (rank 2)"});
  EXPECT_EQ(agent.debug_info().backward_passes, 0U);
  EXPECT_TRUE(context.gradients().empty());
}

TEST(ExactBackwardMessages, WorkerThatLeftTwoHopsAwayIsLost) {
  static std::atomic<bool> called, left, ended;
  called = left = ended = false;
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 0) {
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&asked::twice_on>(1, leaf({3}), 2).sum();
      called = true;
      EXPECT_TRUE(comes_true([] { return left.load(); }));
      expect_lost(agent, loss, context);
      ended = true;
    } else if (agent.self().rank == 2) {
      EXPECT_TRUE(comes_true([] { return called.load(); }));
      agent.leave();
      left = true;
    }
    EXPECT_TRUE(comes_true([] { return ended.load(); }));
    agent.leave();
  });
}

TEST(ExactBackwardProcesses, WorkerKilledTwoHopsAwayIsLost) {
  for (const std::string transport : {"shm", "tcp"}) {
    Processes processes(3, [&](int rank) {
      rpc::Agent agent =
          rpc::init("worker" + std::to_string(rank),
                    {.rank = rank, .world_size = 3, .timeout = 20s, .transports = {transport}});
      if (rank == 0) {
        AutogradContext context(agent);
        const at::Tensor loss = agent.sync<&asked::twice_on>(1, leaf({3}), 2).sum();
        Processes::say("forward");
        EXPECT_TRUE(comes_true([&] { return !agent.sync<&asked::reaches>(1, 2); }));
        expect_lost(agent, loss, context);
        Processes::say("done");
        agent.leave();
      } else {
        ::pause();
      }
    });
    processes.wait_for(0, "forward");
    processes.signal(2, SIGKILL);
    processes.wait_for(0, "done");
    processes.signal(1, SIGKILL);
    processes.expect_success({1, 2});
  }
}

}  // namespace
}  // namespace weft
