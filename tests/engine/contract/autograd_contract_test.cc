// SPDX-License-Identifier: Apache-2.0
// A program that uses each spelling of the public API of distributed autograd and its optimizers
// once, and checks the result. Where this does not compile, users' programs do not either.
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/autograd.h>
#include <weft/optim.h>
#include <weft/parallel.h>

namespace autograd_contract {

using namespace weft;
using namespace std::chrono_literals;

at::Tensor filled(double value) { return torch::full({2}, value, torch::kDouble); }

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : weight(register_parameter("weight", filled(3))),
        unused(register_parameter("unused", filled(1))) {}
  at::Tensor forward(at::Tensor x) { return x * weight; }
  std::vector<RRef<at::Tensor>> parameter_rrefs() {
    return {RRef<at::Tensor>(weight), RRef<at::Tensor>(unused)};
  }
  at::Tensor gradient() { return AutogradContext::current().gradient(weight); }
  at::Tensor weight, unused;
};

std::uint64_t id_of_context() { return AutogradContext::current().id(); }

std::atomic<bool> breaks{false};
at::Tensor doubled(at::Tensor x) {
  at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor&) {
    if (breaks) throw std::runtime_error("broken on purpose");
  });
  return y;
}

struct Refusing : torch::optim::SGD {
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure = nullptr) override {
    throw std::runtime_error("refused on purpose");
  }
};

template <class F>
Error error_of(F function) {
  try {
    function();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(Blame::Busy, "no error");
}

class AutogradContract : public testing::Test {
 protected:
  static rpc::Options options(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    return {.rank = rank, .world_size = 2, .store = store, .transports = {"inproc"}};
  }
  // Two workers of one process: worker0 runs `body`, worker1 serves.
  static void run(const std::function<void(rpc::Agent&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::thread other([&] {
      rpc::Agent agent = rpc::init("worker1", options(1, store));
      agent.shutdown();
    });
    {
      rpc::Agent agent = rpc::init("worker0", options(0, store));
      try {
        body(agent);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      agent.shutdown();
    }
    other.join();
  }
  // Two workers that are the ranks of a group as well; both run the body.
  static void run_both(const std::function<void(rpc::Agent&, ProcessGroup)>& body) {
    const auto of_agents = c10::make_intrusive<c10d::HashStore>();
    const auto of_group = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options(rank, of_agents));
          body(agent, init_process_group({.backend = "tcp",
                                          .rank = rank,
                                          .world_size = 2,
                                          .store = of_group,
                                          .timeout = 60s}));
          agent.shutdown();
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (auto& rank : ranks) rank.join();
  }
};

TEST_F(AutogradContract, GradientsLieAtTheirParameters) {
  run([](rpc::Agent& agent) {
    const RRef<LayerImpl> layer = agent.remote<LayerImpl>("worker1");
    const at::Tensor x = filled(5).requires_grad_(), other = filled(5).requires_grad_();
    AutogradContext context(agent);
    EXPECT_EQ(agent.sync<&id_of_context>("worker1"), context.id());
    EXPECT_EQ(error_of([&] { AutogradContext second(agent); }).blame(), Blame::Caller);
    const at::Tensor loss = layer.sync<&LayerImpl::forward>(x).sum();
    context.backward({loss});
    at::Tensor g = context.gradient(x);
    EXPECT_TRUE(g.equal(filled(3)));
    EXPECT_FALSE(context.gradient(other).defined());
    EXPECT_FALSE(x.grad().defined());
    EXPECT_TRUE(layer.sync<&LayerImpl::gradient>().equal(filled(5)));
    const std::vector<std::pair<at::Tensor, at::Tensor>> all = context.gradients();
    ASSERT_EQ(all.size(), 1U);
    EXPECT_TRUE(all[0].first.is_same(x));
    EXPECT_TRUE(all[0].second.equal(filled(3)));
    context.release();
    EXPECT_EQ(error_of([&] { context.gradient(x); }).blame(), Blame::Caller);
  });
}

TEST_F(AutogradContract, PassesTakeOptions) {
  run([](rpc::Agent& agent) {
    const RRef<LayerImpl> layer = agent.remote<LayerImpl>("worker1");
    const at::Tensor x = filled(5).requires_grad_();
    AutogradContext context(agent);
    const at::Tensor loss = layer.sync<&LayerImpl::forward>(x).sum();
    context.backward({loss}, {.retain_graph = true, .mode = BackwardMode::Fast});
    context.backward({loss}, {.retain_graph = true});
    EXPECT_TRUE(context.gradient(x).equal(filled(6)));
    const at::Tensor unused = layer.sync<&LayerImpl::forward>(x);
    agent.set_timeout(200ms);  // also limits a pass
    EXPECT_EQ(error_of([&] {
                context.backward({loss}, {.retain_graph = true, .mode = BackwardMode::Fast});
              }).blame(),
              Blame::Timeout);
    agent.set_timeout(30s);
    EXPECT_TRUE(context.gradient(x).equal(filled(6)));
    context.backward({loss}, {.retain_graph = false, .mode = BackwardMode::Exact});
    EXPECT_TRUE(context.gradient(x).equal(filled(9)));
  });
}

TEST_F(AutogradContract, FailedPassLeavesNothing) {
  run([](rpc::Agent& agent) {
    const at::Tensor x = filled(5).requires_grad_();
    AutogradContext context(agent);
    const at::Tensor loss = agent.sync<&doubled>("worker1", x).sum();
    breaks = true;
    const Error error = error_of([&] { context.backward({loss}, {.retain_graph = true}); });
    breaks = false;
    EXPECT_EQ(error.blame(), Blame::Remote);
    EXPECT_NE(std::string(error.what()).find("broken on purpose"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("worker1"), std::string::npos) << error.what();
    EXPECT_FALSE(context.gradient(x).defined());
    context.backward({loss});
    EXPECT_TRUE(context.gradient(x).equal(filled(2)));
  });
}

TEST_F(AutogradContract, ReleaseCancelsARunningPass) {
  run([](rpc::Agent& agent) {
    const RRef<LayerImpl> layer = agent.remote<LayerImpl>("worker1");
    const at::Tensor x = filled(5).requires_grad_();
    AutogradContext context(agent);
    const at::Tensor loss = layer.sync<&LayerImpl::forward>(x).sum();
    std::promise<void> released;
    x.register_hook([&](const at::Tensor&) {
      std::thread([&] { context.release(); }).join();
      released.set_value();
    });
    EXPECT_EQ(error_of([&] { context.backward({loss}); }).blame(), Blame::Cancelled);
    EXPECT_EQ(released.get_future().wait_for(30s), std::future_status::ready);
  });
}

TEST_F(AutogradContract, OptimizerStepsAtTheParameters) {
  run([](rpc::Agent& agent) {
    const RRef<LayerImpl> layer = agent.remote<LayerImpl>("worker1");
    const at::Tensor own = filled(5).requires_grad_();
    std::vector<RRef<at::Tensor>> parameter_rrefs = layer.sync<&LayerImpl::parameter_rrefs>();
    parameter_rrefs.emplace_back(agent, own);
    DistributedOptimizer<torch::optim::SGD> opt(parameter_rrefs, torch::optim::SGDOptions(0.05));
    {
      AutogradContext context(agent);
      context.backward({layer.sync<&LayerImpl::forward>(own).sum()});
      opt.step(context);
    }
    EXPECT_TRUE(at::allclose(parameter_rrefs[0].to_here(), filled(3 - 0.05 * 5)));
    EXPECT_TRUE(at::allclose(own, filled(5 - 0.05 * 3)));
    DistributedOptimizer<torch::optim::SGD> decaying(
        parameter_rrefs, torch::optim::SGDOptions(0.05).weight_decay(0.5));
    {
      AutogradContext context(agent);
      context.backward({layer.sync<&LayerImpl::forward>(own).sum()});
      Future<void> stepped = decaying.step_async(context);
      stepped.get();
    }
    EXPECT_TRUE(
        at::allclose(parameter_rrefs[0].to_here(), filled(2.75 - 0.05 * (4.85 + 0.5 * 2.75))));
    EXPECT_TRUE(at::allclose(own, filled(4.85 - 0.05 * (2.75 + 0.5 * 4.85))));
    EXPECT_TRUE(parameter_rrefs[1].to_here().equal(filled(1)))
        << "without a gradient there is no decay";
  });
}

TEST_F(AutogradContract, ErrorListsAllFailedOwners) {
  run([](rpc::Agent& agent) {
    const RRef<LayerImpl> layer = agent.remote<LayerImpl>("worker1");
    const at::Tensor own = filled(5).requires_grad_();
    std::vector<RRef<at::Tensor>> parameter_rrefs = layer.sync<&LayerImpl::parameter_rrefs>();
    parameter_rrefs.emplace_back(agent, own);
    DistributedOptimizer<Refusing> opt(parameter_rrefs, torch::optim::SGDOptions(0.05));
    AutogradContext context(agent);
    context.backward({layer.sync<&LayerImpl::forward>(own).sum()});
    const std::string text = error_of([&] { opt.step(context); }).what();
    for (const char* part : {"worker0", "worker1", "refused on purpose"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  });
}

TEST_F(AutogradContract, DdpAveragesIntoTheContext) {
  run_both([](rpc::Agent& agent, ProcessGroup group) {
    torch::nn::Linear model(2, 1);
    DistributedDataParallel ddp(model, group, DdpOptions{});
    AutogradContext context(agent);
    context.backward({ddp(torch::full({1, 2}, group.rank() + 1.0F)).sum()});
    EXPECT_TRUE(at::allclose(context.gradient(model->weight), torch::full({1, 2}, 1.5F)));
    EXPECT_FALSE(model->weight.grad().defined());
  });
}

TEST_F(AutogradContract, GroupOptimizersMatchPlainOnes) {
  run_both([](rpc::Agent&, ProcessGroup group) {
    const auto model = std::make_shared<LayerImpl>(), plain_model = std::make_shared<LayerImpl>();
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(model->parameters(), group,
                                                     torch::optim::AdamOptions(1e-3));
    torch::optim::Adam plain(plain_model->parameters(), torch::optim::AdamOptions(1e-3));
    for (const auto& one : {model, plain_model}) {
      (one->forward(filled(5)) + one->unused * one->unused).sum().backward();
    }
    zero.step();
    plain.step();
    EXPECT_FALSE(model->weight.equal(filled(3)));
    EXPECT_TRUE(model->weight.equal(plain_model->weight));
    EXPECT_TRUE(model->unused.equal(plain_model->unused));
    const std::vector<at::Tensor> parameters{filled(group.rank()), filled(2 * group.rank())};
    average_parameters(parameters, group);
    EXPECT_TRUE(parameters[0].equal(filled(0.5)));
    EXPECT_TRUE(parameters[1].equal(filled(1)));
  });
}

TEST(AutogradContractOptions, AreAggregatesInThisOrder) {
  const BackwardOptions options{.retain_graph = true, .mode = BackwardMode::Exact};
  EXPECT_TRUE(options.retain_graph);
  EXPECT_EQ(options.mode, BackwardMode::Exact);
  const BackwardOptions defaults;
  EXPECT_FALSE(defaults.retain_graph);
  EXPECT_EQ(defaults.mode, BackwardMode::Fast);
}

}  // namespace autograd_contract
