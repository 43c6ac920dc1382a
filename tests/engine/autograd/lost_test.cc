// SPDX-License-Identifier: Apache-2.0
// Tests passes that lose a worker which the root reaches only through another worker.
#include <atomic>
#include <csignal>

#include <unistd.h>

#include <torch/csrc/autograd/custom_function.h>

#include <weft/tests/engine/autograd/settings.h>

namespace lost {

using namespace weft;

// Its backward reports that it runs, and ends only with its process.
struct NeverEnding : torch::autograd::Function<NeverEnding> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    harness::Processes::say("inside of the pass");
    for (;;) ::pause();
  }
};
at::Tensor twice(at::Tensor a) { return a * 2; }
at::Tensor twice_on(at::Tensor a, int rank) { return rpc::this_agent().sync<&twice>(rank, a) * a; }
at::Tensor never_ending(at::Tensor a) { return NeverEnding::apply(a); }
at::Tensor never_ending_on(at::Tensor a, int rank) {
  return rpc::this_agent().sync<&never_ending>(rank, a) * a;
}
int number(int value) { return value; }
// Waits until calls from here to that worker fail; false if they do not.
bool is_lost_here(int rank) {
  rpc::Agent& agent = rpc::this_agent();
  return harness::comes_true([&] {
    try {
      agent.sync<&number>(rank, 1);
      return false;
    } catch (const Error&) {
      return true;
    }
  });
}
std::size_t passes_here() { return rpc::this_agent().debug_info().backward_passes; }

}  // namespace lost

namespace weft {
namespace {

using namespace harness;
using namespace std::chrono_literals;

// The error names both workers, and comes long before the timeout, whose blame would be Timeout.
void expect_lost(AutogradContext& context, const at::Tensor& loss, const BackwardOptions& options) {
  const auto error = error_of([&] { context.backward({loss}, options); });
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
  for (const std::string part : {"failed on worker1 (rank 1", "worker2 (rank 2"}) {
    EXPECT_NE(error.text().find(part), std::string::npos) << error.text();
  }
  EXPECT_TRUE(context.gradients().empty());
}
void expect_no_pass(rpc::Agent& agent, int rank) {
  EXPECT_TRUE(comes_true([&] { return agent.sync<&lost::passes_here>(rank) == 0; })) << rank;
}

// Worker 0 calls 1, which calls 2.
TEST(LostBehindAnother, WorkerThatLeftEndsThePass) {
  static std::atomic<bool> called, over;
  called = over = false;
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 2) {
      EXPECT_TRUE(comes_true([] { return called.load(); }));
    }
    if (agent.self().rank == 0) {
      const auto a = leaf({3});
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&lost::twice_on>(1, a, 2).sum();
      called = true;
      EXPECT_TRUE(agent.sync<&lost::is_lost_here>(1, 2));
      expect_lost(context, loss, {});
      expect_no_pass(agent, 0);
      expect_no_pass(agent, 1);
      over = true;
    }
    if (agent.self().rank == 1) {
      EXPECT_TRUE(comes_true([] { return over.load(); }));
    }
    agent.leave();
  });
}

TEST(LostBehindAnotherProcess, KilledWorkerEndsThePass) {
  for (const std::string transport : {"shm", "tcp"}) {
    Processes processes(3, [&](int rank) {
      rpc::Agent agent =
          rpc::init("worker" + std::to_string(rank),
                    {.rank = rank, .world_size = 3, .timeout = 30s, .transports = {transport}});
      if (rank > 0) ::pause();
      const auto a = leaf({3});
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&lost::twice_on>(1, a, 2).sum();
      Processes::say("forward");
      EXPECT_TRUE(agent.sync<&lost::is_lost_here>(1, 2));
      expect_lost(context, loss, {});
      expect_no_pass(agent, 0);
      expect_no_pass(agent, 1);
      agent.leave();
    });
    processes.wait_for(0, "forward");
    processes.signal(2, SIGKILL);
    processes.expect_success({1, 2});
  }
}

TEST(LostBehindAnotherProcess, WorkerKilledInThePassEndsIt) {
  for (const std::string transport : {"shm", "tcp"}) {
    for (const auto mode : {BackwardMode::Fast, BackwardMode::Exact}) {
      Processes processes(3, [&](int rank) {
        rpc::Agent agent =
            rpc::init("worker" + std::to_string(rank),
                      {.rank = rank, .world_size = 3, .timeout = 30s, .transports = {transport}});
        if (rank > 0) ::pause();
        const auto a = leaf({3});
        AutogradContext context(agent);
        const at::Tensor loss = agent.sync<&lost::never_ending_on>(1, a, 2).sum();
        expect_lost(context, loss, {.mode = mode});
        expect_no_pass(agent, 0);
        expect_no_pass(agent, 1);
        agent.leave();
      });
      processes.wait_for(2, "inside of the pass");
      processes.signal(2, SIGKILL);
      processes.expect_success({1, 2});
    }
  }
}

}  // namespace
}  // namespace weft
