// SPDX-License-Identifier: Apache-2.0
// Tests passes that have ended without an error on one worker and may still fail on another: their
// gradients there may still be discarded.
#include <array>
#include <condition_variable>
#include <mutex>
#include <set>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/call/core.h>
#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>

namespace unsettled {

using namespace weft;

// This process's weight, and the number of gradients that have arrived at it on each worker since
// look_again().
std::array<std::atomic<int>, 4> came{};
at::Tensor& weight() {
  static at::Tensor it = [] {
    at::Tensor ones = at::ones({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
    ones.register_hook([](const at::Tensor&) {
      ++came.at(autograd::Pass::current()->context()->core()->self().rank);
    });
    return ones;
  }();
  return it;
}
at::Tensor weighted(at::Tensor a) { return a * weight(); }
at::Tensor weighted_on(at::Tensor a, int rank) {
  return rpc::this_agent().sync<&weighted>(rank, a);
}
at::Tensor make_weight() {
  return at::zeros({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
}
at::Tensor use(RRef<at::Tensor> parameter, at::Tensor a) {
  return weighted(a) + a * parameter.local_value();
}
// Called from outside of the context, because a call from inside would bring it along.
bool has_gradient_of_weight(std::uint64_t id) {
  const auto context = autograd::contexts_of(*rpc::this_agent().shared_core()).find(id);
  return context && context->passes().gradient(weight()).defined();
}
at::Tensor gradient_of_weight() { return AutogradContext::current().gradient(weight()); }
std::vector<at::Tensor> gradients_here() {
  std::vector<at::Tensor> all;
  for (const auto& [parameter, gradient] : AutogradContext::current().gradients())
    all.push_back(gradient);
  return all;
}
std::size_t passes_here() { return rpc::this_agent().debug_info().backward_passes; }
void look_again() { came.at(rpc::this_agent().self().rank) = 0; }
// True if a pass has arrived here and has ended here.
bool has_ended_here() {
  const rpc::Agent& here = rpc::this_agent();
  return came.at(here.self().rank) > 0 && here.debug_info().backward_passes == 0;
}

// Holds a pass at the root until the gate opens; then the pass may fail.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = true;
  bool breaks = false;
  void set(bool is_open, bool with_failure) {
    std::lock_guard lock(mutex);
    open = is_open;
    breaks = with_failure;
    changed.notify_all();
  }
};
Gate gate;
struct Late : torch::autograd::Function<Late> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    std::unique_lock lock(gate.mutex);
    gate.changed.wait(lock, [] { return gate.open; });
    if (gate.breaks) throw std::runtime_error("the node broke");
    return {gradients[0] * 2};
  }
};

// Absorbs the weight's gradient, as DistributedDataParallel does with its parameters.
struct Averaged : torch::autograd::Function<Averaged> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    autograd::Pass::current()->gradients().absorb(weight());
    return {gradients[0] * 2};
  }
};
at::Tensor averaged(at::Tensor a) { return Averaged::apply(a * weight()); }
void run_a_pass_here(at::Tensor a) { AutogradContext::current().backward({weighted(a).sum()}); }

}  // namespace unsettled

namespace weft {
namespace {

using namespace harness;
using namespace unsettled;
using namespace std::chrono_literals;

class UnsettledPass : public testing::TestWithParam<Setting> {};

// Runs a pass that fails at the root after it has ended on these workers, and `meanwhile` before it
// fails.
void fail_late(
    rpc::Agent& agent, AutogradContext& context, const at::Tensor& loss,
    const std::set<int>& workers, const std::function<void()>& meanwhile = [] {}) {
  for (const int rank : workers) agent.sync<&look_again>(rank);
  gate.set(false, false);
  std::thread thread([&] {
    const auto error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
  });
  for (const int rank : workers)
    EXPECT_TRUE(comes_true([&] { return agent.sync<&has_ended_here>(rank); }));
  meanwhile();
  gate.set(true, true);
  thread.join();
  gate.set(true, false);
}

TEST_P(UnsettledPass, GradientsReadEarlyAreDiscarded) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor late = Late::apply(b).sum();  // recorded first, so it runs last
    const at::Tensor loss = agent.sync<&weighted>(1, a).sum() + late;
    fail_late(agent, context, loss, {1}, [&] {
      EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
      const auto all = agent.sync<&gradients_here>(1);
      ASSERT_EQ(all.size(), 1U);
      EXPECT_TRUE(at::equal(all[0], a.detach()));
    });
    EXPECT_FALSE(agent.sync<&gradient_of_weight>(1).defined());
    EXPECT_TRUE(agent.sync<&gradients_here>(1).empty());
    context.backward({loss}, {.retain_graph = true});
    EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
    // This one follows a pass that has ended everywhere, whose gradients stay.
    fail_late(agent, context, loss, {1}, [&] {
      EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), 2 * a.detach()));
      const auto all = agent.sync<&gradients_here>(1);
      ASSERT_EQ(all.size(), 1U);
      EXPECT_TRUE(at::equal(all[0], 2 * a.detach()));
    });
    EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
    EXPECT_TRUE(at::equal(agent.sync<&gradients_here>(1).at(0), a.detach()));
  });
}

// The messages about the failure are refused for longer than a worker waits for them.
TEST_P(UnsettledPass, NextPassOrStepTellsOfTheFailure) {
  rpc::Options options;
  options.faults.fail_first[rpc::MessageKind::Backward] = 1 << 20;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const int last = static_cast<int>(agent.workers().size()) - 1;
        const auto parameter = agent.remote<&make_weight>(1);
        const DistributedOptimizer<torch::optim::SGD> optimizer({parameter},
                                                                torch::optim::SGDOptions(1.0));
        const auto a = leaf({3}), b = leaf({3}), c = leaf({3});
        AutogradContext context(agent);
        // With two workers, worker 1 is the last one as well, and its weight is used twice.
        const at::Tensor late = Late::apply(b).sum();
        const at::Tensor loss = agent.sync<&use>(1, parameter, a).sum() +
                                agent.sync<&weighted_on>(1, c, last).sum() + late;
        fail_late(agent, context, loss, {1, last});
        context.backward({loss}, {.retain_graph = true});
        const at::Tensor expected = last == 1 ? (a + c).detach() : c.detach();
        EXPECT_TRUE(at::allclose(agent.sync<&gradient_of_weight>(last), expected));
        fail_late(agent, context, loss, {1, last});
        optimizer.step(context);
        EXPECT_TRUE(at::equal(parameter.to_here(), -a.detach()))
            << "the step has used a failed pass";
      },
      options);
}

TEST_P(UnsettledPass, AveragingBesideAnOpenPassIsRefused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor late = Late::apply(b).sum();  // recorded first, so it runs last
    const at::Tensor loss = agent.sync<&weighted>(1, a).sum() + late;
    const at::Tensor there = agent.sync<&averaged>(1, a).sum(), here = averaged(a).sum();
    constexpr BackwardOptions kAgain{.retain_graph = true, .mode = BackwardMode::Exact};
    const auto expect_refused = [&](const at::Tensor& root) {
      const auto error = error_of([&] { context.backward({root}, kAgain); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("another pass of context"), std::string::npos) << error.text();
    };
    agent.sync<&look_again>(1);
    gate.set(false, false);
    std::thread thread([&] { context.backward({loss}, kAgain); });
    EXPECT_TRUE(comes_true([&] { return agent.sync<&has_ended_here>(1); }));
    expect_refused(there);
    expect_refused(here);
    gate.set(true, false);
    thread.join();
    EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()))
        << "a refused pass must leave nothing";
    context.backward({there}, kAgain);
    context.backward({here}, kAgain);
    EXPECT_TRUE(at::equal(context.gradient(a), at::full({3}, 5.0, at::kDouble)));
  });
}

TEST_P(UnsettledPass, LaterGradientsAddToAnAverage) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = at::rand({3}, at::kDouble), c = leaf({3});
    AutogradContext context(agent);
    const auto expect_there = [&](const at::Tensor& expected) {
      const auto found = agent.sync<&gradient_of_weight>(1);
      EXPECT_TRUE(at::allclose(found, expected)) << found << expected;
      const auto all = agent.sync<&gradients_here>(1);
      ASSERT_EQ(all.size(), 1U);
      EXPECT_TRUE(at::allclose(all[0], expected)) << all[0] << expected;
    };
    context.backward({agent.sync<&averaged>(1, a).sum()});
    expect_there(2 * a.detach());
    agent.sync<&run_a_pass_here>(1, b);  // a pass of worker 1's own
    expect_there(2 * a.detach() + b);
    context.backward({agent.sync<&weighted>(1, c)
                          .sum()});  // which tells worker 1 that the first one has ended everywhere
    expect_there(2 * a.detach() + b + c.detach());
  });
}

TEST_P(UnsettledPass, MessageOfAnEndedPassStartsNothing) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3});
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&weighted>(1, a).sum();
    context.backward({loss}, {.retain_graph = true});
    const auto request = context.shared()->recording().all().at(0)->message();
    const autograd::MessageId reply{request.caller, request.call, /*reply=*/true};
    // A number before that of the pass, which no worker remembers.
    const autograd::PassName early{
        .context = context.id(), .pass = context.id(), .retain_graph = true};
    for (const auto& [rank, message] : {std::pair(1, reply), std::pair(0, request)}) {
      const auto outcome = agent.sync<&autograd::internal::gradient>(
          rank, autograd::GradientMessage{early, message, {at::ones({3}, at::kDouble)}});
      EXPECT_TRUE(outcome.failed()) << rank;
      EXPECT_EQ(outcome.error().blame(), Blame::Cancelled);
    }
    EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
    EXPECT_TRUE(at::equal(context.gradient(a), at::ones({3}, at::kDouble)));
    EXPECT_EQ(agent.debug_info().backward_passes, 0U);
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, UnsettledPass, testing::ValuesIn(autograd_settings()),
                         setting_name);

// The messages to worker 1 are repeated for 14 s and never arrive.
TEST(UnsettledPassAlone, ErrorDoesNotWaitForSilentWorkers) {
  static std::atomic<bool> ended;
  ended = false;
  rpc::Options options;
  options.faults.drop.insert(rpc::MessageKind::Backward);
  run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank == 0) {
          const auto parameter = agent.remote<&make_weight>(1);
          const DistributedOptimizer<torch::optim::SGD> optimizer({parameter},
                                                                  torch::optim::SGDOptions(1.0));
          gate.set(true, true);
          AutogradContext context(agent);
          const at::Tensor late = Late::apply(leaf({3})).sum();
          const auto pass =
              context.backward_async({agent.sync<&use>(1, parameter, leaf({3})).sum() + late});
          const auto step = optimizer.step_async(context);
          EXPECT_TRUE(comes_true([&] { return pass.done() && step.done(); }));
          for (const auto& one : {pass, step}) {
            const auto error = error_of([&] { one.get(); });
            EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
          }
          gate.set(true, false);
          ended = true;
        }
        EXPECT_TRUE(comes_true([] { return ended.load(); }, 60s));
        agent.leave();
      },
      options);
}

// Worker 0 calls 1, which calls 2. When both have ended their parts, 1 leaves, so the pass fails.
// No worker is left to tell 2, which never had a message from 0.
TEST(UnsettledPassAlone, WorkerBehindALostOneLearnsOfIt) {
  static std::atomic<bool> ended, over;
  ended = over = false;
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 0) {
      const auto a = leaf({3}), b = leaf({3});
      agent.sync<&look_again>(2);
      gate.set(false, false);
      {
        AutogradContext context(agent);
        const auto id = context.id();
        const at::Tensor late = Late::apply(b).sum();  // recorded first, so it runs last
        const at::Tensor loss = agent.sync<&weighted_on>(1, a, 2).sum() + late;
        std::thread pass([&] {
          const auto error = error_of([&] { context.backward({loss}); });
          EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
        });
        std::thread outside([&] {
          EXPECT_TRUE(comes_true([&] { return agent.sync<&has_ended_here>(2); }));
          EXPECT_TRUE(agent.sync<&has_gradient_of_weight>(2, id));
          EXPECT_TRUE(comes_true([&] { return agent.sync<&passes_here>(1) == 0; }));
          ended = true;
          EXPECT_TRUE(comes_true([&] { return !agent.sync<&has_gradient_of_weight>(2, id); }));
        });
        outside.join();
        gate.set(true, false);
        pass.join();
      }
      over = true;
    } else {
      EXPECT_TRUE(
          comes_true([&] { return agent.self().rank == 1 ? ended.load() : over.load(); }, 60s));
    }
    agent.leave();
  });
}

}  // namespace
}  // namespace weft
