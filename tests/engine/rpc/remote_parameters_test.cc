// SPDX-License-Identifier: Apache-2.0
// References to the parameters of remote modules, and to objects that a program has already.
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/autograd.h>
#include <weft/optim.h>
#include <weft/rpc.h>
#include <weft/tests/engine/rpc/workers.h>

namespace remote_modules {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double value)
      : first(register_module("first", torch::nn::Linear(3, 2))),
        second(register_module("second", torch::nn::Linear(2, 2))) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(value);
  }
  at::Tensor forward(at::Tensor x) { return second(first(x)); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Net);

// A layer that is used twice, under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() : a(register_module("a", torch::nn::Linear(2, 2))), b(register_module("b", a)) {}
  torch::nn::Linear a, b;
};

// No module, but it has parameters all the same.
struct Table {
  std::vector<at::Tensor> parameters() const { return {rows}; }
  at::Tensor rows = torch::ones({4}, torch::requires_grad());
};

Net holder(double value) { return Net(value); }
Net no_net() { return Net(nullptr); }
std::shared_ptr<torch::nn::Module> base(double value) { return std::make_shared<NetImpl>(value); }
torch::nn::Sequential sequential() {
  return torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
}

struct Count {
  virtual ~Count() = default;
  int add(int by) { return value += by; }
  int value = 0;
};
struct CountInHand final : Count {
  CountInHand() = default;
  CountInHand(const CountInHand&) = delete;
  CountInHand& operator=(const CountInHand&) = delete;
};
int added(weft::RRef<Count> count, int by) { return count.sync<&Count::add>(by); }

}  // namespace remote_modules

namespace weft {
namespace {

using namespace remote_modules;
using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;

class RemoteParameters : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(, RemoteParameters,
                         ::testing::Values(Setting{As::Threads, "tcp", 3},
                                           Setting{As::Processes, "shm", 3}),
                         harness::name_of);

std::vector<std::vector<std::int64_t>> shapes(const std::vector<RRef<at::Tensor>>& references) {
  std::vector<std::vector<std::int64_t>> all;
  for (const auto& reference : references) all.push_back(reference.to_here().sizes().vec());
  return all;
}

const std::vector<std::vector<std::int64_t>> kShapesOfNet = {{2, 3}, {2}, {2, 2}, {2}};

TEST_P(RemoteParameters, OfModulesHoldersPointersAndOwnTypes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto module = remote_parameters(agent.remote<NetImpl>(1, 2.0));
    EXPECT_EQ(shapes(module), kShapesOfNet);
    EXPECT_EQ(module[0].owner(), agent.worker(1));
    EXPECT_TRUE(module[0].to_here().requires_grad());
    EXPECT_EQ(module[3].to_here().min().item<double>(), 2);
    EXPECT_EQ(shapes(remote_parameters(agent.remote<&holder>(1, 1.0))), kShapesOfNet);
    EXPECT_EQ(shapes(remote_parameters(agent.remote<&base>(2, 1.0))), kShapesOfNet);
    EXPECT_EQ(shapes(remote_parameters(agent.remote<Net>(2, 1.0))), kShapesOfNet);
    EXPECT_EQ(remote_parameters(agent.remote<&sequential>(2)).size(), 4U);
    EXPECT_EQ(remote_parameters(agent.remote<TiedImpl>(1)).size(), 2U);
    EXPECT_EQ(shapes(remote_parameters(agent.remote<Table>(1))),
              (std::vector<std::vector<std::int64_t>>{{4}}));
    // Of this worker's own module: the parameters themselves.
    const Net own(3.0);
    const auto here = remote_parameters(RRef<NetImpl>(agent, own.ptr()));
    EXPECT_TRUE(here[0].local_value().is_same(own->first->weight));
  });
}

TEST_P(RemoteParameters, OfNothingAreRefused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto null = agent.remote<&no_net>(1);
    EXPECT_THAT(error_of([&] { remote_parameters(null); }).text(),
                ::testing::HasSubstr("the value is no module, but null"));
    EXPECT_EQ(error_of([] { remote_parameters(RRef<NetImpl>()); }).blame(), Blame::Caller);
    const auto in_time = agent.remote<NetImpl>(1, 1.0);
    EXPECT_EQ(remote_parameters(in_time.timeout(std::chrono::seconds(30))).size(), 4U);
  });
}

TEST_P(RemoteParameters, AreSteppedByADistributedOptimizer) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto first = agent.remote<NetImpl>(1, 1.0), second = agent.remote<NetImpl>(2, 1.0);
    auto parameters = remote_parameters(first);
    for (const auto& more : remote_parameters(second)) parameters.push_back(more);
    DistributedOptimizer<torch::optim::SGD> optimizer(parameters, torch::optim::SGDOptions(0.5));
    {
      AutogradContext context(agent);
      const at::Tensor x = torch::ones({1, 3});
      const at::Tensor loss =
          first.sync<&NetImpl::forward>(x).sum() + second.sync<&NetImpl::forward>(x).sum();
      context.backward({loss});
      optimizer.step(context);
    }
    // The gradient of each bias of the second layer is 1, that of the first layer's 2.
    for (const std::size_t net : {0U, 4U}) {
      EXPECT_EQ(parameters[net + 3].to_here().max().item<double>(), 0.5);
      EXPECT_EQ(parameters[net + 1].to_here().max().item<double>(), 0);
    }
    EXPECT_EQ(remote_parameters(first)[3].to_here().max().item<double>(), 0.5);
  });
}

TEST_P(RemoteParameters, KeepTheParametersWithoutTheModule) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto parameters = remote_parameters(agent.remote<NetImpl>(1, 4.0));
    EXPECT_EQ(parameters[2].to_here().max().item<double>(), 4);
  });
}

// An object of this worker that others call, and that this one goes on using.
TEST_P(RemoteParameters, ObjectOfASharedPointerIsTheValueItself) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto count = std::make_shared<CountInHand>();
    {
      const RRef<Count> reference(agent, count);
      EXPECT_EQ(agent.sync<&added>(1, reference, 3), 3);
      EXPECT_EQ(count->value, 3);
      count->value = 10;
      EXPECT_EQ(agent.sync<&added>(2, reference, 1), 11);
      EXPECT_EQ(&reference.local_value(), count.get());
    }
    EXPECT_TRUE(harness::comes_true([&] { return count.use_count() == 1; }));
    EXPECT_EQ(error_of([&] { RRef<Count>(agent, std::shared_ptr<CountInHand>()); }).blame(),
              Blame::Caller);
    // The pointer, where that is the type of the value.
    const RRef<std::shared_ptr<CountInHand>> pointer(agent, count);
    EXPECT_EQ(pointer.local_value(), count);
    const RRef deduced(agent, count);
    static_assert(std::is_same_v<decltype(deduced)::value_type, std::shared_ptr<CountInHand>>);
    const RRef<std::shared_ptr<CountInHand>> null(agent, nullptr);
    EXPECT_EQ(null.local_value(), nullptr);
  });
}

}  // namespace
}  // namespace weft
