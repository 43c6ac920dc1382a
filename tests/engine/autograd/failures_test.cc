// SPDX-License-Identifier: Apache-2.0
// Tests passes that fail.
#include <csignal>

#include <torch/autograd.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/call/core.h>
#include <weft/tests/engine/autograd/settings.h>

namespace broken {

using namespace weft;

std::atomic<int> failures{1 << 30};  // how many times the node throws

struct Throwing : torch::autograd::Function<Throwing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    if (failures-- > 0) throw std::runtime_error("the node broke");
    return {gradients[0] * 2};
  }
};
// Holding holds a pass until go_on is set.
std::mutex mutex;
std::condition_variable changed;
bool held = false, go_on = false;
struct Holding : torch::autograd::Function<Holding> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    std::unique_lock lock(mutex);
    held = true;
    changed.notify_all();
    changed.wait(lock, [] { return go_on; });
    return {gradients[0] * 2};
  }
};

at::Tensor mul(at::Tensor a, at::Tensor b) { return a * b; }
// Its gradient at 0 is 0 / 0.
at::Tensor root_times_zero(at::Tensor a) { return a.sqrt() * 0; }
// A result that packs a string where its reader expects a number.
struct Unreadable {
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    packer.pack(std::string("no number"));
  }
  void msgpack_unpack(const msgpack::object& object) { object.as<int>(); }
};
struct UnreadableResult {
  at::Tensor tensor;
  Unreadable last;
  WEFT_FIELDS(tensor, last)
};
UnreadableResult unreadable(at::Tensor a) { return {a * 2, {}}; }
at::Tensor breaks(at::Tensor a) { return Throwing::apply(a); }
at::Tensor holds(at::Tensor a) { return Holding::apply(a); }
at::Tensor breaks_on(at::Tensor a, int rank) {
  return rpc::this_agent().sync<&breaks>(rank, a) * a;
}
int may_fail(int times) {
  failures = times;
  return 0;
}
std::size_t gradients_here() { return AutogradContext::current().gradients().size(); }
std::size_t passes_here() { return rpc::this_agent().debug_info().backward_passes; }
int number(int value) { return value; }
// This process's weight, and the number of gradients that have arrived at it.
std::atomic<int> came{0};
at::Tensor& weight() {
  static at::Tensor it = at::ones({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
  return it;
}
at::Tensor weighted(at::Tensor a) { return a * weight(); }
at::Tensor weighted_on(at::Tensor a, int rank) {
  return rpc::this_agent().sync<&weighted>(rank, a);
}
at::Tensor gradient_of_weight() { return AutogradContext::current().gradient(weight()); }

}  // namespace broken

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

class FailingBackward : public testing::TestWithParam<Setting> {};

TEST_P(FailingBackward, NodesErrorReachesTheRoot) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const int last = static_cast<int>(agent.workers().size()) - 1;
    agent.sync<&broken::may_fail>(last, 1 << 30);
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor y = agent.sync<&broken::mul>(1, a, b);
    const at::Tensor z = agent.sync<&broken::breaks_on>(1, y, last);
    const at::Tensor loss = agent.sync<&broken::mul>(last, z, a).sum();
    const auto error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    EXPECT_EQ(error.blame(), Blame::Remote);
    for (const std::string part : {"the node broke", "Throwing"}) {
      EXPECT_NE(error.text().find(part), std::string::npos) << error.text();
    }
    EXPECT_NE(error.text().find(agent.worker(last).name + " (rank"), std::string::npos)
        << error.text();
    // No worker keeps anything of the failed pass, and the graph can be used again.
    for (const auto& worker : agent.workers()) {
      EXPECT_EQ(agent.sync<&broken::gradients_here>(worker), 0u) << worker.name;
      EXPECT_EQ(agent.sync<&broken::passes_here>(worker), 0u) << worker.name;
    }
    agent.sync<&broken::may_fail>(last, 0);
    context.backward({loss}, {.retain_graph = true});
    const auto local = torch::autograd::grad({(a * b * 2 * (a * b) * a).sum()}, {a, b});
    EXPECT_TRUE(at::allclose(context.gradient(a), local[0], 1e-10, 1e-10));
    EXPECT_TRUE(at::allclose(context.gradient(b), local[1], 1e-10, 1e-10));
  });
}

// Sets anomaly mode for the process and for processes that are forked later. Does not use
// DetectAnomalyGuard, because the thread sanitizer does not see how libtorch locks the mutex that
// the guard unlocks.
struct AnomalyOn {
  AnomalyOn() { torch::autograd::AnomalyMode::set_enabled(true, /*check_nan=*/true); }
  ~AnomalyOn() { torch::autograd::AnomalyMode::set_enabled(false); }
  AnomalyOn(const AnomalyOn&) = delete;
  AnomalyOn& operator=(const AnomalyOn&) = delete;
};

TEST_P(FailingBackward, AnomalyModeNamesTheNodeOfNans) {
  const auto run = [](bool is_on) {
    run_workers(GetParam(), [is_on](rpc::Agent& agent) {
      if (agent.self().rank != 0) return;
      const auto a = at::zeros({3}, at::kDouble).requires_grad_();
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&broken::root_times_zero>(1, a).sum();
      if (!is_on) {
        context.backward({loss});
        EXPECT_TRUE(context.gradient(a).isnan().all().item<bool>());
        return;
      }
      const auto error = error_of([&] { context.backward({loss}); });
      EXPECT_EQ(error.blame(), Blame::Remote);
      for (const std::string part :
           {"worker1 (rank 1)", "Function 'SqrtBackward0' returned nan values in its 0th output"}) {
        EXPECT_NE(error.text().find(part), std::string::npos) << part << " in " << error.text();
      }
      EXPECT_TRUE(context.gradients().empty());
    });
  };
  run(false);
  const AnomalyOn on;
  run(true);
}

TEST(FailingBackwardAlone, AnomalyModeShowsTheNodesOrigin) {
  struct Warnings final : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text += warning.msg(); }
    std::string text;
  };
  const AnomalyOn on;
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    broken::may_fail(1 << 30);
    AutogradContext context(agent);
    const at::Tensor loss = broken::Throwing::apply(leaf({3})).sum();
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard here(
        &warnings);  // for this thread, which runs the root's nodes
    error_of([&] { context.backward({loss}); });
    EXPECT_NE(warnings.text.find("Error detected in"), std::string::npos) << warnings.text;
    EXPECT_NE(warnings.text.find("Throwing"), std::string::npos) << warnings.text;
  });
}

// Its messages lead to no loss, so no pass waits for their gradients.
TEST_P(FailingBackward, UnreadableReplyTakesNoPart) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    EXPECT_THROW(agent.sync<&broken::unreadable>(1, a), std::exception);
    const at::Tensor loss = agent.sync<&broken::mul>(1, a, b).sum();
    context.backward({loss});
    EXPECT_TRUE(at::allclose(context.gradient(a), b.detach()));
  });
}

TEST_P(FailingBackward, UnsentGradientEndsThePass) {
  rpc::Options options;
  options.faults.fail_first[rpc::MessageKind::Gradient] = 1;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto a = leaf({3}), b = leaf({3});
        AutogradContext context(agent);
        const at::Tensor loss = agent.sync<&broken::mul>(1, a, b).sum();
        // Our gradient is refused first, then the peer's.
        for (int i = 0; i < 2; ++i) {
          const auto error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
          EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
          EXPECT_TRUE(context.gradients().empty());
        }
        context.backward({loss});
        EXPECT_TRUE(at::allclose(context.gradient(a), b.detach()));
      },
      options);
}

TEST_P(FailingBackward, LostGradientEndsThePassInTime) {
  rpc::Options options;
  options.timeout = 1500ms;
  options.faults.drop.insert(rpc::MessageKind::Gradient);
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto a = leaf({3});
        AutogradContext context(agent);
        const at::Tensor loss = agent.sync<&broken::mul>(1, a, a).sum();
        const auto error = error_of([&] { context.backward({loss}); });
        EXPECT_EQ(error.blame(), Blame::Timeout) << error.text();
      },
      options);
}

TEST_P(FailingBackward, ReleaseDuringAPassCancelsIt) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "the test holds a node of another worker through this process's memory";
  broken::held = broken::go_on = false;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3});
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&broken::holds>(1, a).sum();
    std::thread releasing([&] {
      std::unique_lock lock(broken::mutex);
      broken::changed.wait(lock, [] { return broken::held; });
      lock.unlock();
      context.release();
    });
    const auto error = error_of([&] { context.backward({loss}); });
    EXPECT_EQ(error.blame(), Blame::Cancelled) << error.text();
    releasing.join();
    {
      std::lock_guard lock(broken::mutex);
      broken::go_on = true;
    }
    broken::changed.notify_all();
    EXPECT_TRUE(comes_true([&] { return agent.sync<&broken::passes_here>(1) == 0; }));
  });
}

TEST_P(FailingBackward, ConcurrentFailedPassLeavesNothing) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "the test holds a node of another worker through this process's memory";
  broken::held = broken::go_on = false;
  broken::came = 0;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    broken::may_fail(1);
    const auto hook = broken::weight().register_hook([](const at::Tensor&) { ++broken::came; });
    const auto a = leaf({3}), b = leaf({3}), c = leaf({3});
    AutogradContext context(agent);
    const at::Tensor holding =
        broken::Holding::apply(broken::Throwing::apply(b)).sum();  // recorded first; runs last
    const at::Tensor failing = agent.sync<&broken::weighted>(1, a).sum() + holding;
    const at::Tensor good = agent.sync<&broken::weighted>(1, c).sum();
    std::thread thread([&] {
      const auto error =
          error_of([&] { context.backward({failing}, {.mode = BackwardMode::Exact}); });
      EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
    });
    // The pass has ended on worker 1 before the next one arrives there, and fails after that.
    EXPECT_TRUE(comes_true([&] {
      std::lock_guard lock(broken::mutex);
      return broken::held;
    }));
    EXPECT_TRUE(
        comes_true([&] { return broken::came == 1 && agent.sync<&broken::passes_here>(1) == 0; }));
    context.backward({good}, {.mode = BackwardMode::Exact});
    {
      std::lock_guard lock(broken::mutex);
      broken::go_on = true;
    }
    broken::changed.notify_all();
    thread.join();
    EXPECT_TRUE(at::equal(agent.sync<&broken::gradient_of_weight>(1), c.detach()));
    EXPECT_FALSE(context.gradient(a).defined());
    broken::weight().remove_hook(hook);
  });
}

TEST_P(FailingBackward, LateNewsOfAFailureStillDiscardsIt) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "the test looks at another worker's weight through this process's memory";
  rpc::Options options;
  options.faults.fail_first[rpc::MessageKind::Backward] = 1;
  broken::held = broken::go_on = false;
  broken::came = 0;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        broken::may_fail(1);
        const auto hook = broken::weight().register_hook([](const at::Tensor&) { ++broken::came; });
        const auto a = leaf({3}), b = leaf({3});
        AutogradContext context(agent);
        const at::Tensor holding =
            broken::Holding::apply(broken::Throwing::apply(b)).sum();  // recorded first; runs last
        const at::Tensor loss = agent.sync<&broken::weighted>(1, a).sum() + holding;
        std::thread thread([&] {
          const auto error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
          EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
        });
        // Worker 1 has ended its part without an error.
        EXPECT_TRUE(comes_true(
            [&] { return broken::came == 1 && agent.sync<&broken::passes_here>(1) == 0; }));
        {
          std::lock_guard lock(broken::mutex);
          broken::go_on = true;
        }
        broken::changed.notify_all();
        thread.join();
        context.backward({loss});
        EXPECT_TRUE(at::equal(agent.sync<&broken::gradient_of_weight>(1), a.detach()));
        EXPECT_TRUE(at::equal(context.gradient(a), at::ones({3}, at::kDouble)));
        broken::weight().remove_hook(hook);
      },
      options);
}

TEST_P(FailingBackward, NoGradCallsAreNotWaitedFor) {
  rpc::Options options;
  options.timeout = 10s;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const int last = static_cast<int>(agent.workers().size()) - 1;
        AutogradContext context(agent);
        const auto a = leaf({3});
        {
          const torch::NoGradGuard off;
          agent.sync<&broken::weighted>(1, a);
          agent.sync<&broken::weighted_on>(1, a, last);
          agent.remote<&broken::weighted_on>(1, a, last).to_here();
          agent.sync<&broken::weighted_on>(0, a, last);
        }
        EXPECT_TRUE(context.shared()->recording().all().empty());
        context.backward({agent.sync<&broken::weighted>(1, a).sum() +
                          agent.sync<&broken::weighted_on>(1, a, last).sum()});
        EXPECT_TRUE(at::equal(context.gradient(a), at::full({3}, 2, at::kDouble)));
      },
      options);
}

TEST_P(FailingBackward, FailedCallIsNotWaitedFor) {
  rpc::Options options;
  options.faults.fail_first[rpc::MessageKind::Call] = 1;
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto a = leaf({3}), b = leaf({3});
        AutogradContext context(agent);
        EXPECT_EQ(error_of([&] { agent.sync<&broken::mul>(1, a, a); }).blame(), Blame::PeerLost);
        EXPECT_TRUE(context.shared()->recording().all().empty());
        context.backward({agent.sync<&broken::mul>(1, a, b).sum()});
        EXPECT_TRUE(at::allclose(context.gradient(a), b.detach()));
      },
      options);
}

// A peer could send gradients like these.
TEST_P(FailingBackward, UnfitGradientsAreRefused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor y = agent.sync<&broken::mul>(1, a, b);
    const auto request = context.shared()->recording().all().at(0)->message();
    const autograd::MessageId reply{request.caller, request.call, /*reply=*/true};
    const auto send = [&](autograd::MessageId message, std::vector<at::Tensor> gradients) {
      static std::uint64_t pass = 1 << 20;
      return agent.sync<&autograd::internal::gradient>(
          1,
          autograd::GradientMessage{{.context = context.id(), .pass = ++pass, .retain_graph = true},
                                    message,
                                    std::move(gradients)});
    };
    const auto one = at::ones({3}, at::kDouble);
    EXPECT_EQ(send({0, 1 << 20, true}, {one}).error().blame(), Blame::Caller);
    error_of([&] { send(reply, {one, one}); });
    EXPECT_TRUE(send(reply, {at::ones({4}, at::kDouble)}).failed());
  });
}

bool is_gone(rpc::Agent& agent, int rank) {
  try {
    agent.sync<&broken::number>(rank, 1);
    return false;
  } catch (const Error&) {
    return true;
  }
}

// An outcome's bytes come from another worker and may be made up.
TEST(FailingBackwardMessages, MadeUpOutcomeIsRemote) {
  for (const int blame : {99, 1 << 30})
    EXPECT_EQ(call::Outcome(blame, "made up").error().blame(), Blame::Remote);
  EXPECT_EQ(call::Outcome(static_cast<int>(Blame::Timeout), "late").error().blame(),
            Blame::Timeout);
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    AutogradContext context(agent);
    agent.sync<&broken::mul>(1, leaf({3}), leaf({3}));
    const autograd::PassName name{.context = context.id(), .pass = 7};
    EXPECT_EQ(error_of([&] {
                agent.sync<&autograd::internal::pass_failed>(1, name, autograd::Outcome());
              }).blame(),
              Blame::Remote);
  });
}

// Worker 0 calls 1, which calls 2; then 1 and 0 are gone. No worker is left to tell 2, which never
// had a message from 0.
TEST(FailingBackwardMessages, ContextEndsWithItsOwnerAndCaller) {
  static std::atomic<bool> called;
  called = false;
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    std::optional<AutogradContext> context;
    if (agent.self().rank == 0) {
      context.emplace(agent);
      agent.sync<&broken::weighted_on>(1, leaf({3}), 2);
      called = true;
    }
    EXPECT_TRUE(comes_true([] { return called.load(); }));
    if (agent.self().rank == 2) {
      EXPECT_TRUE(comes_true([&] { return agent.debug_info().contexts == 0; }));
    }
    agent.leave();
  });
}

// Otherwise the agent would try to connect to it again and again while the context lives.
TEST(FailingBackwardMessages, LostWorkerIsContactedOnce) {
  static std::atomic<bool> called;
  called = false;
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank == 1) {
      EXPECT_TRUE(comes_true([] { return called.load(); }));
      return agent.leave();
    }
    AutogradContext context(agent);
    const auto y = agent.sync<&broken::mul>(1, leaf({3}), leaf({3}));
    auto& contexts = autograd::contexts_of(*call::detail::CoreCalls::of(agent));
    EXPECT_TRUE(contexts.concerns(1));
    called = true;
    EXPECT_TRUE(comes_true([&] { return !contexts.concerns(1); }));
    EXPECT_EQ(error_of([&] { context.backward({y.sum()}); }).blame(), Blame::PeerLost);
    agent.leave();
  });
}

// Otherwise every message of the context would name every pass that fails from then on.
TEST(FailingBackwardMessages, FailedPassesAreNamedUntilAllKnow) {
  static std::atomic<bool> called, over;
  called = over = false;
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 2) {
      EXPECT_TRUE(comes_true([] { return called.load(); }));
      return agent.leave();
    }
    if (agent.self().rank == 1) {
      EXPECT_TRUE(comes_true([] { return over.load(); }, 60s));
      return agent.leave();
    }
    broken::may_fail(1 << 30);
    AutogradContext context(agent);
    agent.sync<&broken::number>(2, 1);
    const at::Tensor loss = agent.sync<&broken::breaks>(1, leaf({3})).sum();
    called = true;
    EXPECT_TRUE(comes_true([&] { return context.shared()->recording().has_lost(2); }));
    for (int pass = 0; pass < 3; ++pass) {
      error_of([&] { context.backward({loss}, {.retain_graph = true}); });
      EXPECT_TRUE(comes_true([&] { return context.shared()->failed_passes().untold().empty(); }))
          << pass;
    }
    over = true;
    agent.leave();
  });
}

TEST(FailingBackwardMessages, TooManyNamedPassesAreRefused) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    AutogradContext context(agent);
    agent.sync<&broken::mul>(1, leaf({3}), leaf({3}));
    const auto request = context.shared()->recording().all().at(0)->message();
    autograd::GradientMessage message{
        {.context = context.id(), .pass = 1 << 20, .retain_graph = true},
        {request.caller, request.call, /*reply=*/true},
        {at::ones({3}, at::kDouble)}};
    for (std::size_t i = 0; i <= autograd::kMostNamed; ++i) message.name.failed.push_back(7 + i);
    const auto error = error_of([&] { agent.sync<&autograd::internal::gradient>(1, message); });
    EXPECT_NE(error.text().find("names 257 failed passes"), std::string::npos) << error.text();
    EXPECT_EQ(context.shared()->failed_passes().untold().size(), 0U);
  });
}

TEST(FailingBackwardProcesses, LostWorkerEndsThePass) {
  for (const std::string transport : {"shm", "tcp"}) {
    Processes processes(4, [&](int rank) {
      rpc::Agent agent =
          rpc::init("worker" + std::to_string(rank),
                    {.rank = rank, .world_size = 4, .timeout = 5s, .transports = {transport}});
      const auto a = leaf({3});
      {
        AutogradContext context(agent);
        const at::Tensor loss = agent.sync<&broken::mul>((rank + 1) % 4, a, a).sum();
        Processes::say("forward");
        if (rank % 2 == 0) {
          EXPECT_TRUE(comes_true([&] { return is_gone(agent, (rank + 1) % 4); }));
          const auto error = error_of([&] { context.backward({loss}); });
          EXPECT_TRUE(error.blame() == Blame::PeerLost || error.blame() == Blame::Timeout)
              << error.what();
        } else {
          ::pause();
        }
      }
      EXPECT_TRUE(comes_true([&] { return agent.debug_info().backward_passes == 0; }));
      agent.leave();
    });
    for (int rank = 0; rank < 4; ++rank) processes.wait_for(rank, "forward");
    for (const int rank : {1, 3}) processes.signal(rank, SIGKILL);
    processes.expect_success({1, 3});
  }
}

INSTANTIATE_TEST_SUITE_P(Autograd, FailingBackward, testing::ValuesIn(autograd_settings()),
                         setting_name);

}  // namespace
}  // namespace weft
