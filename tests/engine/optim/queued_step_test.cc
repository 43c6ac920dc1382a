// SPDX-License-Identifier: Apache-2.0
// Tests steps that are queued behind a running pass: when each owner steps, and what a failed pass
// leaves.
#include <condition_variable>
#include <mutex>
#include <set>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <weft/base/make_error.h>
#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>
#include <weft/transport/inproc/faults.h>

namespace queued {

using namespace weft;

// State that the workers of this process share outside of all messages.
std::mutex mutex;
std::condition_variable changed;
std::set<int> stepped;  // ranks
bool breaks = false;
void forget_all(bool with_failure) {
  std::lock_guard lock(mutex);
  stepped.clear();
  breaks = with_failure;
}
bool has_stepped(int rank) {
  std::lock_guard lock(mutex);
  return stepped.contains(rank);
}

// Records which rank has stepped. A parameter's number of elements tells its owner: see make().
struct TellingSgd : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    const int rank = static_cast<int>(param_groups()[0].params()[0].numel()) - 1;
    auto loss = SGD::step(std::move(closure));
    std::lock_guard lock(mutex);
    stepped.insert(rank);
    changed.notify_all();
    return loss;
  }
};
struct Unmakeable : torch::optim::SGD {
  Unmakeable(std::vector<at::Tensor> parameters, torch::optim::SGDOptions options)
      : SGD(std::move(parameters), options) {
    throw std::runtime_error("the constructor broke");
  }
};
// If `breaks` is set, its backward throws, but not before worker 1 has stepped.
struct BreaksLate : torch::autograd::Function<BreaksLate> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    std::unique_lock lock(mutex);
    if (!breaks) return {gradients[0] * 2};
    changed.wait_for(lock, std::chrono::seconds(20), [] { return stepped.contains(1); });
    throw std::runtime_error("the node broke");
  }
};
struct BreaksAtOnce : torch::autograd::Function<BreaksAtOnce> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("the node broke");
  }
};

// Makes a parameter whose number of elements is its owner's rank + 1.
at::Tensor make() {
  return at::zeros({rpc::this_agent().self().rank + 1}, at::TensorOptions().dtype(at::kDouble))
      .requires_grad_();
}
at::Tensor use(RRef<at::Tensor> parameter) { return parameter.local_value() * 3; }
at::Tensor use_and_break_late(RRef<at::Tensor> parameter) {
  return BreaksLate::apply(parameter.local_value());
}
at::Tensor use_and_break(RRef<at::Tensor> parameter) {
  return BreaksAtOnce::apply(parameter.local_value());
}
// The parameter's owner gets the gradient from this worker, not from worker 0.
at::Tensor use_from_here(RRef<at::Tensor> parameter) { return parameter.to_here() * 3; }
at::Tensor value(RRef<at::Tensor> parameter) { return parameter.local_value().detach().clone(); }
at::Tensor gradient(RRef<at::Tensor> parameter) {
  return AutogradContext::current().gradient(parameter.local_value());
}

}  // namespace queued

namespace weft {
namespace {

using namespace harness;
using queued::TellingSgd;

const torch::optim::SGDOptions kOptions(1.0);

at::Tensor filled(int elements, double value) { return at::full({elements}, value, at::kDouble); }

class QueuedStep : public testing::TestWithParam<Setting> {};

TEST_P(QueuedStep, UpdatesOwnersNearAndFar) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int last = static_cast<int>(agent.workers().size()) - 1;
    for (const auto mode : {BackwardMode::Fast, BackwardMode::Exact}) {
      const auto near = agent.remote<&queued::make>(after(agent, 1)),
                 far = agent.remote<&queued::make>(after(agent, last));
      const auto own = RRef<at::Tensor>(agent, filled(2, 0).requires_grad_());
      const auto idle = agent.remote<&queued::make>(after(agent, last));
      DistributedOptimizer<torch::optim::SGD> optimizer({near, far, own, idle}, kOptions);
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&queued::use>(near.owner(), near).sum() +
                              agent.sync<&queued::use_from_here>(after(agent, 1), far).sum() +
                              own.local_value().sum();
      const auto pass = context.backward_async({loss}, {.mode = mode});
      optimizer.step_async(context).get();
      EXPECT_TRUE(pass.done());
      EXPECT_TRUE(at::equal(near.to_here(), filled(near.owner().rank + 1, -3)));
      EXPECT_TRUE(at::equal(far.to_here(), filled(far.owner().rank + 1, -3)));
      EXPECT_TRUE(at::equal(own.local_value(), filled(2, -1)));
      EXPECT_TRUE(at::equal(idle.to_here(), filled(idle.owner().rank + 1, 0)));
    }
  });
}

TEST_P(QueuedStep, SumsGradientsOfSeveralPasses) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto parameter = agent.remote<&queued::make>(after(agent, 1));
    DistributedOptimizer<torch::optim::SGD> optimizer({parameter}, kOptions);
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&queued::use>(parameter.owner(), parameter).sum();
    context.backward_async({loss}, {.retain_graph = true});
    context.backward_async({loss}, {.retain_graph = true});
    optimizer.step_async(context).get();
    EXPECT_TRUE(at::equal(parameter.to_here(), filled(parameter.owner().rank + 1, -6)));
  });
}

// The caller need not wait until the optimizer is made, either.
TEST_P(QueuedStep, WaitsForItsOptimizerToBeMade) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto parameter = agent.remote<&queued::make>(after(agent, 1));
    AutogradContext context(agent);
    const auto pass =
        context.backward_async({agent.sync<&queued::use>(parameter.owner(), parameter).sum()});
    const DistributedOptimizer<torch::optim::SGD> optimizer({parameter}, kOptions,
                                                            {.wait_until_made = false});
    optimizer.step_async(context).get();
    EXPECT_TRUE(at::equal(parameter.to_here(), filled(parameter.owner().rank + 1, -3)));
    const DistributedOptimizer<queued::Unmakeable> broken({parameter}, kOptions,
                                                          {.wait_until_made = false});
    const auto error = error_of([&] { broken.step(context); });
    EXPECT_NE(error.text().find("the constructor broke"), std::string::npos) << error.text();
  });
}

TEST_P(QueuedStep, FailedOwnerDoesNotStep) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto parameter = agent.remote<&queued::make>(1);
    DistributedOptimizer<torch::optim::SGD> optimizer({parameter}, torch::optim::SGDOptions(1.0));
    for (const bool is_known_before : {false, true}) {
      AutogradContext context(agent);
      const auto pass =
          context.backward_async({agent.sync<&queued::use_and_break>(1, parameter).sum()});
      if (is_known_before) {
        EXPECT_TRUE(comes_true([&] { return pass.failed(); }));
      }
      const auto error = error_of([&] { optimizer.step_async(context).get(); });
      EXPECT_EQ(error.blame(), Blame::Remote);
      EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
      EXPECT_EQ(error.text().find("have stepped"), std::string::npos) << error.text();
      EXPECT_TRUE(pass.failed());
      EXPECT_TRUE(at::equal(parameter.to_here(), filled(2, 0)));
    }
  });
}

TEST_P(QueuedStep, FailedPassNamesThoseThatStepped) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "workers wait for each other through this process's memory";
  if (GetParam().workers < 3) GTEST_SKIP() << "two owners and a root";
  queued::forget_all(/*with_failure=*/true);
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto first = agent.remote<&queued::make>(1), second = agent.remote<&queued::make>(2);
    DistributedOptimizer<TellingSgd> optimizer({first, second}, kOptions);
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&queued::use>(1, first).sum() +
                            agent.sync<&queued::use_and_break_late>(2, second).sum();
    context.backward_async({loss}, {.retain_graph = true});
    const auto error = error_of([&] { optimizer.step_async(context).get(); });
    EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("stepped before they heard of it: worker1 (rank 1)"),
              std::string::npos)
        << error.text();
    EXPECT_FALSE(queued::has_stepped(2));
    // The gradient with which worker 1 has stepped is not counted again.
    EXPECT_FALSE(agent.sync<&queued::gradient>(1, first).defined());
    queued::forget_all(/*with_failure=*/false);
    context.backward({loss});
    EXPECT_TRUE(at::equal(agent.sync<&queued::gradient>(1, first), filled(2, 3)));
    optimizer.step(context);
    EXPECT_TRUE(at::equal(first.to_here(), filled(2, -6)));
    EXPECT_TRUE(at::equal(second.to_here(), filled(3, -2)));
  });
}

INSTANTIATE_TEST_SUITE_P(Optim, QueuedStep, testing::ValuesIn(autograd_settings()), setting_name);

// Worker 0 receives nothing from the moment when it begins the pass, so the messages that it sends
// must suffice for the step.
TEST(QueuedStepOnAHeldLink, OwnerStepsBeforeAnyReply) {
  queued::forget_all(/*with_failure=*/false);
  static std::mutex mutex;
  static std::vector<transport::inproc::Faults> backs;
  backs.clear();
  transport::inproc::on_link([](const auto&, const auto& back) {
    std::lock_guard lock(mutex);
    backs.push_back(back);
  });
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto parameter = agent.remote<&queued::make>(1);
    DistributedOptimizer<TellingSgd> optimizer({parameter}, kOptions);
    AutogradContext context(agent);
    const at::Tensor loss = parameter.to_here().sum();
    const auto held = [] {
      std::lock_guard lock(mutex);
      return backs;
    }();
    for (const auto& back : held) back.hold_at(back.written());
    const auto pass = context.backward_async({loss});
    const auto step = optimizer.step_async(context);
    EXPECT_TRUE(comes_true([] { return queued::has_stepped(1); }));
    EXPECT_FALSE(pass.done());
    EXPECT_FALSE(step.done());
    for (const auto& back : held) back.release();
    step.get();
    EXPECT_TRUE(pass.done());
    EXPECT_TRUE(at::equal(parameter.to_here(), filled(2, -1)));
  });
  transport::inproc::on_link({});
}

}  // namespace
}  // namespace weft
