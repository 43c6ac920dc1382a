// SPDX-License-Identifier: Apache-2.0
// Counts the messages of an iteration: exactly those on which its steps depend, each a request and
// its reply.
#include <map>
#include <mutex>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <weft/optim.h>
#include <weft/profiling/trace/operation.h>
#include <weft/tests/engine/autograd/settings.h>

namespace counted {

using namespace weft;

at::Tensor random() { return torch::rand({3, 3}, at::TensorOptions().requires_grad(true)); }
std::size_t calls_waiting() { return rpc::this_agent().debug_info().calls_waiting; }

}  // namespace counted

namespace weft {
namespace {

using namespace harness;

// Counts the requests that workers of this process have received and answered, by the called
// function.
class Requests final : public trace::Observer {
 public:
  static Requests& of_process() {
    static Requests requests;
    static const bool observed = (trace::observe(requests), true);
    static_cast<void>(observed);
    return requests;
  }
  std::map<std::string, int> take() {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(open_, 0) << "requests without a reply";
    return std::exchange(seen_, {});
  }

 private:
  void begun(const trace::Member&, trace::Kind kind, const char* name,
             std::uint64_t) noexcept override {
    if (kind != trace::Kind::Served || is_of_the_test(name)) return;
    std::lock_guard lock(mutex_);
    ++seen_[short_name(name)];
    ++open_;
  }
  void ended(trace::Kind kind, const char* name, double, const Error*,
             std::uint64_t) noexcept override {
    if (kind != trace::Kind::Served || is_of_the_test(name)) return;
    std::lock_guard lock(mutex_);
    --open_;
  }
  // Worker 1 asks from the beginning whether it may shut down.
  static bool is_of_the_test(const std::string& name) {
    return name.find("calls_waiting") != std::string::npos ||
           name.find("join_shutdown") != std::string::npos;
  }
  // Shortens "weft::autograd::internal::clean_up" to "clean_up". All requests for a step are
  // "step": one that is queued behind a pass may find that the pass has ended.
  static std::string short_name(const std::string& name) {
    const auto end = name.find_first_of("<(");
    const auto colon = name.rfind(':', end);
    const std::string last =
        name.substr(colon + 1, end == std::string::npos ? end : end - colon - 1);
    return last.starts_with("step_") ? "step" : last;
  }
  std::mutex mutex_;
  std::map<std::string, int> seen_;
  int open_ = 0;
};

// Waits until all requests are answered, and returns those since the previous call.
std::map<std::string, int> asked(rpc::Agent& agent) {
  EXPECT_TRUE(comes_true([&] {
    return agent.debug_info().calls_waiting == 0 && agent.sync<&counted::calls_waiting>(1) == 0;
  }));
  return Requests::of_process().take();
}
using Counts = std::map<std::string, int>;

class Messages : public testing::Test {
 protected:
  using Optimizer = DistributedOptimizer<torch::optim::SGD>;
  const torch::optim::SGDOptions options_{0.05};
  // Runs `body` on worker 0 of two.
  static void run(const std::function<void(rpc::Agent&)>& body) {
    Requests::of_process();
    run_workers({As::Threads, "inproc", 2}, [&](rpc::Agent& agent) {
      agent.sync<&counted::calls_waiting>(1 - agent.self().rank);
      if (agent.self().rank != 0) return;
      asked(agent);
      body(agent);
    });
  }
};

// The usual example: two tensors of another worker, their sum, a backward, an optimizer, its step.
TEST_F(Messages, ExampleSendsOnlyNeededOnes) {
  run([&](rpc::Agent& agent) {
    {
      AutogradContext context(agent);
      const auto first = agent.remote<&counted::random>(1),
                 second = agent.remote<&counted::random>(1);
      const auto a = first.fetch(), b = second.fetch();
      const at::Tensor loss = (a.get() + b.get()).sum();
      // Two values are made and two are fetched.
      EXPECT_EQ(asked(agent), (Counts{{"random", 2}, {"fetch", 2}}));
      context.backward({loss});
      // Each value arrived in its own message, so there is a gradient for each. The reply to one
      // says that the pass has ended.
      EXPECT_EQ(asked(agent), (Counts{{"gradient", 2}}));
      Optimizer optimizer({first, second}, options_);
      // One request for each owner, as for the step. The owner confirms each reference that was
      // passed to it.
      EXPECT_EQ(asked(agent), (Counts{{"make_local", 1}, {"child_accepted", 2}}));
      optimizer.step(context);
      EXPECT_EQ(asked(agent), (Counts{{"step", 1}}));
    }
    // The context, the two values and the optimizer are released.
    EXPECT_EQ(asked(agent), (Counts{{"clean_up", 1}, {"user_delete", 3}}));
  });
}

TEST_F(Messages, KeptObjectsNeedFewer) {
  run([&](rpc::Agent& agent) {
    const auto first = agent.remote<&counted::random>(1),
               second = agent.remote<&counted::random>(1);
    const Optimizer optimizer({first, second}, options_);
    asked(agent);
    for (const bool queued : {false, true}) {
      {
        AutogradContext context(agent);
        const auto a = first.fetch(), b = second.fetch();
        const at::Tensor loss = (a.get() + b.get()).sum();
        EXPECT_EQ(asked(agent), (Counts{{"fetch", 2}}));
        if (queued) {
          context.backward_async({loss});
          optimizer.step_async(context).get();
          EXPECT_EQ(asked(agent), (Counts{{"gradient", 2}, {"step", 1}}));
        } else {
          context.backward({loss});
          optimizer.step(context);
          EXPECT_EQ(asked(agent), (Counts{{"gradient", 2}, {"step", 1}}));
        }
      }
      EXPECT_EQ(asked(agent), (Counts{{"clean_up", 1}}));
    }
  });
}

TEST_F(Messages, FirstExactPassTakesOneMore) {
  run([&](rpc::Agent& agent) {
    const auto first = agent.remote<&counted::random>(1),
               second = agent.remote<&counted::random>(1);
    AutogradContext context(agent);
    const at::Tensor loss = (first.to_here() + second.to_here()).sum();
    asked(agent);
    context.backward({loss}, {.retain_graph = true, .mode = BackwardMode::Exact});
    EXPECT_EQ(asked(agent), (Counts{{"reach", 1}, {"gradient", 2}}));
    context.backward({loss}, {.mode = BackwardMode::Exact});
    EXPECT_EQ(asked(agent), (Counts{{"gradient", 2}}));
  });
}

}  // namespace
}  // namespace weft
