// Passes that have ended well on one worker and may yet fail on another: what they have brought there is nobody's for good.
#include <condition_variable>
#include <mutex>

#include <torch/torch.h>

#include <weft/engine/autograd/context.h>
#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>

namespace unsettled {

using namespace weft;

// One weight of this process, and how many gradients have come to it since the last look.
std::atomic<int> came{0};
at::Tensor& weight() {
  static at::Tensor it = [] {
    at::Tensor ones = at::ones({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
    ones.register_hook([](const at::Tensor&) { ++came; });
    return ones;
  }();
  return it;
}
at::Tensor weighted(at::Tensor a) { return a * weight(); }
at::Tensor make_weight() { return at::zeros({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_(); }
at::Tensor use(RRef<at::Tensor> parameter, at::Tensor a) { return weighted(a) + a * parameter.local_value(); }
at::Tensor gradient_of_weight() { return AutogradContext::current().gradient(weight()); }
std::vector<at::Tensor> gradients_here() {
  std::vector<at::Tensor> all;
  for (const auto& [parameter, gradient] : AutogradContext::current().gradients()) all.push_back(gradient);
  return all;
}
// Whether a pass has come here since the last time that it had, and has ended here.
bool has_ended_here() {
  if (came == 0 || rpc::this_agent().debug_info().backward_passes > 0) return false;
  came = 0;
  return true;
}

// At the root: holds the pass there until it is let go, and may then fail.
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

}  // namespace unsettled

namespace weft {
namespace {

using namespace harness;
using namespace unsettled;
using namespace std::chrono_literals;

class UnsettledPass : public testing::TestWithParam<Setting> {};

// Runs a pass that fails at the root when it has ended on worker 1, and `meanwhile` between the two.
void fail_late(rpc::Agent& agent, AutogradContext& context, const at::Tensor& loss,
               const std::function<void()>& meanwhile = [] {}) {
  gate.set(false, false);
  std::thread thread([&] {
    const auto error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    EXPECT_NE(error.text().find("the node broke"), std::string::npos) << error.text();
  });
  EXPECT_TRUE(comes_true([&] { return agent.sync<&has_ended_here>(1); }));
  meanwhile();
  gate.set(true, true);
  thread.join();
  gate.set(true, false);
}

TEST_P(UnsettledPass, WhatIsReadOfItIsDiscardedAllTheSameWhenItFailsElsewhere) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto a = leaf({3}), b = leaf({3});
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&weighted>(1, a).sum() + Late::apply(b).sum();
    fail_late(agent, context, loss, [&] {
      EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
      const auto all = agent.sync<&gradients_here>(1);
      ASSERT_EQ(all.size(), 1U);
      EXPECT_TRUE(at::equal(all[0], a.detach()));
    });
    EXPECT_FALSE(agent.sync<&gradient_of_weight>(1).defined());
    EXPECT_TRUE(agent.sync<&gradients_here>(1).empty());
    context.backward({loss}, {.retain_graph = true});
    EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
    // Behind one that has ended well everywhere, which stays.
    agent.sync<&has_ended_here>(1);
    fail_late(agent, context, loss, [&] {
      EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), 2 * a.detach()));
      const auto all = agent.sync<&gradients_here>(1);
      ASSERT_EQ(all.size(), 1U);
      EXPECT_TRUE(at::equal(all[0], 2 * a.detach()));
    });
    EXPECT_TRUE(at::equal(agent.sync<&gradient_of_weight>(1), a.detach()));
    EXPECT_TRUE(at::equal(agent.sync<&gradients_here>(1).at(0), a.detach()));
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, UnsettledPass, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
