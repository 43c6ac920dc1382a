// SPDX-License-Identifier: Apache-2.0
// Tests calls outside of any context, whose gradients are lost. When a backward pass shows that
// they were wanted, the process warns, and only once; so each worker is a process.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <torch/jit.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <weft/tests/engine/autograd/settings.h>

namespace outside {

using namespace weft;

at::Tensor twice(at::Tensor a) { return a * 2; }
at::Tensor same(at::Tensor a) { return a; }
std::vector<at::Tensor> both(at::Tensor a) { return {a * 2, a.detach()}; }
Future<at::Tensor> twice_later(at::Tensor a) {
  return rpc::this_agent().async<&twice>(rpc::this_call().caller.rank, a);
}
struct Net {
  torch::nn::Linear linear{2, 1};
  at::Tensor forward(at::Tensor x) { return linear->forward(x); }
  at::Tensor weight() const { return linear->weight; }
};
void step(std::vector<at::Tensor> weights, std::vector<at::Tensor> gradients) {
  const c10::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i].sub_(gradients[i]);
}

std::atomic<bool> exposed{false};
void until_exposed() {
  while (!exposed) std::this_thread::yield();
}

}  // namespace outside

namespace weft::harness {
namespace {

using namespace outside;

constexpr const char* kWarning = "outside of an AutogradContext";

std::size_t warnings(const LogWatch& log) {
  const std::string text = log.text();
  std::size_t count = 0;
  for (auto at = text.find(kWarning); at != std::string::npos; at = text.find(kWarning, at + 1))
    ++count;
  return count;
}

std::vector<Setting> with_processes() {
  auto all = settings({2});
  std::erase_if(all, [](const Setting& one) { return one.as != As::Processes; });
  return all;
}

struct Wanted {
  const char* name;
  at::Tensor (*result)(rpc::Agent& agent, const at::Tensor& x);
};
void PrintTo(const Wanted& wanted, std::ostream* out) { *out << wanted.name; }

// Ways to get a result that was computed from x or from the callee's own tensors.
const Wanted kWanted[] = {
    {"Sync",
     [](rpc::Agent& agent, const at::Tensor& x) { return agent.sync<&twice>("worker1", x); }},
    {"Async", [](rpc::Agent& agent,
                 const at::Tensor& x) { return agent.async<&twice>("worker1", x).get(); }},
    {"Remote", [](rpc::Agent& agent,
                  const at::Tensor& x) { return agent.remote<&twice>("worker1", x).to_here(); }},
    {"Fetched",
     [](rpc::Agent& agent, const at::Tensor& x) {
       return agent.remote<&twice>("worker1", x).fetch().get();
     }},
    {"Operator", [](rpc::Agent& agent,
                    const at::Tensor& x) { return agent.sync_op("aten::mul", "worker1", x, 2.0); }},
    {"RemoteOperator",
     [](rpc::Agent& agent, const at::Tensor& x) {
       return agent.remote_op("aten::mul", "worker1", x, 2.0).to_here();
     }},
    {"Script",
     [](rpc::Agent& agent, const at::Tensor& x) {
       return agent.sync_script("outside.twice", "worker1", x);
     }},
    {"InAContainer",
     [](rpc::Agent& agent, const at::Tensor& x) { return agent.sync<&both>("worker1", x)[0]; }},
    {"CallOfACall", [](rpc::Agent& agent,
                       const at::Tensor& x) { return agent.sync<&twice_later>("worker1", x * 2); }},
    {"ModelThere",
     [](rpc::Agent& agent, const at::Tensor& x) {
       return agent.remote<Net>("worker1").sync<&Net::forward>(x.detach());
     }},
    {"OtherThread",
     [](rpc::Agent& agent, const at::Tensor& x) {
       const AutogradContext context(agent);
       at::Tensor result;
       std::thread([&] { result = agent.sync<&twice>("worker1", x); }).join();
       return result;
     }},
};

class Outside : public testing::TestWithParam<std::tuple<Setting, Wanted>> {};

TEST_P(Outside, BackwardIntoAResultWarnsOnce) {
  const auto& [setting, wanted] = GetParam();
  run_workers(setting, [&](rpc::Agent& agent) {
    rpc::expose_script("outside", torch::jit::compile("def twice(x):\n  return x * 2\n"));
    exposed = true;
    if (agent.self().rank != 0) return;
    agent.sync<&until_exposed>("worker1");
    const LogWatch& log = LogWatch::current();
    for (int again = 0; again < 3; ++again) {
      const auto x = at::ones({2}, at::kFloat).requires_grad_();
      const auto result = wanted.result(agent, x);
      EXPECT_EQ(warnings(log), again == 0 ? 0U : 1U)
          << log.text();  // reading the result gives no warning
      result.sum().backward();
      EXPECT_FALSE(x.grad().defined());
      EXPECT_EQ(warnings(log), 1U) << log.text();
    }
    EXPECT_NE(log.text().find("worker1 (rank 1)"), std::string::npos) << log.text();
    EXPECT_NE(log.text().find("context.backward({loss})"), std::string::npos) << log.text();
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, Outside, testing::Combine(testing::ValuesIn(with_processes()), testing::ValuesIn(kWanted)),
    [](const auto& info) { return name(std::get<0>(info.param)) + std::get<1>(info.param).name; });

class Weights : public testing::TestWithParam<Setting> {};

// Correct programs do all this. A result that does warn shows at the end that the test sees the
// log.
TEST_P(Weights, TravelWithoutAWarning) {
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const LogWatch& log = LogWatch::current();
    const auto x = at::ones({2}, at::kFloat).requires_grad_();
    const auto net = agent.remote<Net>("worker1");
    // With a parameter server, parameters arrive and gradients go back.
    const auto weight = net.sync<&Net::weight>();
    ASSERT_TRUE(weight.requires_grad());
    (weight * x).sum().backward();
    agent.sync<&step>("worker1", std::vector{weight}, std::vector{weight.grad()});
    // Weights are sent and come back.
    const auto echoed = agent.sync<&same>("worker1", x);
    echoed.sum().backward();
    EXPECT_TRUE(echoed.grad().defined());
    agent.remote<&same>("worker1", x).to_here().sum().backward();
    // An evaluation runs no backward.
    static_cast<void>(net.sync<&Net::forward>(x).sum().item<float>());
    {
      const c10::AutoGradMode no_grad(false);
      const auto result = agent.sync<&twice>("worker1", x);
      const c10::AutoGradMode grad(true);
      if (result.requires_grad()) result.sum().backward();
    }
    // A model in parts, where the program itself passes the gradients on.
    const auto part = net.sync<&Net::forward>(x).detach().requires_grad_();
    part.sum().backward();
    EXPECT_TRUE(part.grad().defined());
    {
      AutogradContext context(agent);
      context.backward({agent.sync<&twice>("worker1", x).sum()});
      EXPECT_TRUE(at::equal(context.gradient(x), at::full({2}, 2.0F)));
    }
    // In a call to the worker itself the graph continues.
    x.mutable_grad() = at::Tensor();
    agent.sync<&twice>("worker0", x).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0F)));
    EXPECT_EQ(log.text(), "");
    net.sync<&Net::forward>(x).sum().backward();
    EXPECT_EQ(warnings(log), 1U) << log.text();
  });
}

INSTANTIATE_TEST_SUITE_P(All, Weights, testing::ValuesIn(with_processes()), name_of);

}  // namespace
}  // namespace weft::harness
