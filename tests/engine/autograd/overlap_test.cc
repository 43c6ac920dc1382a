// SPDX-License-Identifier: Apache-2.0
// Tests when a pass sends gradients, by the order of events: in the wrong order a node would not
// stop waiting.
#include <condition_variable>
#include <mutex>

#include <torch/csrc/autograd/custom_function.h>

#include <weft/tests/engine/autograd/settings.h>
#include <weft/transport/inproc/faults.h>

namespace overlapping {

using namespace weft;

// A node that continues only when a gradient has reached the peer.
std::mutex overlap;
std::condition_variable overlapped;
bool arrived = false;
struct UntilArrived : torch::autograd::Function<UntilArrived> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    std::unique_lock lock(overlap);
    if (!overlapped.wait_for(lock, std::chrono::seconds(20), [] { return arrived; }))
      throw std::runtime_error("the gradient was held back");
    return {gradients[0] * 2};
  }
};
void tell_of_arrival() {
  std::lock_guard lock(overlap);
  arrived = true;
  overlapped.notify_all();
}
at::Tensor tell_arrival(at::Tensor a) {
  at::Tensor b = a * 3;
  b.register_hook([](const at::Tensor&) { tell_of_arrival(); });
  return b;
}

// The gradients of x and of the weight are ready together; the weight's continues in a held node.
at::Tensor times_held_weight(at::Tensor x) {
  const at::Tensor weight =
      at::ones({3, 3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
  return x.matmul(UntilArrived::apply(weight));
}
at::Tensor twice(at::Tensor x) { return x * 2; }

}  // namespace overlapping

namespace weft {
namespace {

using namespace harness;

class Overlap : public testing::TestWithParam<Setting> {};

TEST_P(Overlap, GradientsLeaveBeforeLocalWork) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "the peer is seen through this process's memory";
  overlapping::arrived = false;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor there = agent.sync<&overlapping::tell_arrival>(1, a);
    // It is recorded later, so it would run first if gradients for other workers did not go first.
    const at::Tensor here = overlapping::UntilArrived::apply(b);
    context.backward({there.sum() + here.sum()});
    EXPECT_TRUE(at::equal(context.gradient(a), at::full({3}, 3.0, at::kDouble)));
    EXPECT_TRUE(at::equal(context.gradient(b), at::full({3}, 2.0, at::kDouble)));
  });
}

TEST_P(Overlap, InputGradientsPrecedeWeightOnes) {
  if (GetParam().as == As::Processes)
    GTEST_SKIP() << "the peer is seen through this process's memory";
  overlapping::arrived = false;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({2, 3});
    a.register_hook([](const at::Tensor&) { overlapping::tell_of_arrival(); });
    AutogradContext context(agent);
    context.backward({agent.sync<&overlapping::times_held_weight>(1, a).sum()});
    EXPECT_TRUE(at::equal(context.gradient(a), at::full({2, 3}, 6.0, at::kDouble)));
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, Overlap, testing::ValuesIn(autograd_settings()), setting_name);

// The link to worker 1 carries nothing from the moment when the pass begins. Worker 0 still
// computes its whole part.
TEST(OverlapOnAHeldLink, LocalPartDoesNotWaitForItsSends) {
  static std::mutex mutex;
  static std::vector<transport::inproc::Faults> ways;
  ways.clear();
  transport::inproc::on_link([](const auto& there, const auto&) {
    std::lock_guard lock(mutex);
    ways.push_back(there);
  });
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    bool local_is_done = false;
    b.register_hook([&](const at::Tensor&) { local_is_done = true; });
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&overlapping::twice>(1, a).sum() + (b * 3).sum();
    const auto held = [] {
      std::lock_guard lock(mutex);
      return ways;
    }();
    for (const auto& way : held) way.hold_at(way.written());
    const auto pass = context.backward_async({loss});
    EXPECT_TRUE(local_is_done);
    EXPECT_FALSE(pass.done());
    for (const auto& way : held) way.release();
    pass.get();
    EXPECT_TRUE(at::equal(context.gradient(a), at::full({3}, 2.0, at::kDouble)));
  });
  transport::inproc::on_link({});
}

}  // namespace
}  // namespace weft
