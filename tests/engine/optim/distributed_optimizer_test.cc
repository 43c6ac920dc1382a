// SPDX-License-Identifier: Apache-2.0
// Tests DistributedOptimizer. Of the optimizers in PyTorch's own tests, libtorch's C++ has no
// Adamax, Adadelta or Rprop.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <weft/base/make_error.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/call/core.h>
#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>

namespace optimized {

using namespace weft;

struct Layer {
  explicit Layer(at::Tensor value) : weight(value.clone().requires_grad_()) {}
  at::Tensor forward(at::Tensor x) { return x.matmul(weight); }
  RRef<at::Tensor> parameter() { return RRef<at::Tensor>(weight); }
  at::Tensor value() { return weight.detach().clone(); }
  void move() { weight.set_data(weight.detach().clone()); }  // to other memory of its worker
  void widen() { weight.set_data(weight.detach().to(at::kDouble)); }
  bool grad_is_empty() { return !weight.grad().defined(); }
  at::Tensor weight;
};
struct ThrowsOnStep : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure) override { throw std::runtime_error("the step broke"); }
};
struct ThrowsOnConstruction : torch::optim::SGD {
  ThrowsOnConstruction(std::vector<at::Tensor> parameters, torch::optim::SGDOptions options)
      : SGD(std::move(parameters), options) {
    throw std::runtime_error("the constructor broke");
  }
};
// Number of parameters with state after the last step on this worker.
std::atomic<std::size_t> states{0};
std::size_t states_of_last_step() { return states; }
template <class O>
struct TellsItsState : O {
  using O::O;
  at::Tensor step(torch::optim::Optimizer::LossClosure closure) override {
    at::Tensor loss = O::step(std::move(closure));
    states = this->state().size();
    return loss;
  }
};
// A step of Meets stays until another step is inside as well, or for limit_ms. Meeting counts how
// many were inside at once.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  int inside = 0, most_inside = 0;
} meeting;
struct Meets : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    std::unique_lock lock(meeting.mutex);
    meeting.most_inside = std::max(meeting.most_inside, ++meeting.inside);
    meeting.changed.notify_all();
    meeting.changed.wait_for(lock, std::chrono::milliseconds(limit_ms),
                             [] { return meeting.most_inside > 1; });
    --meeting.inside;
    lock.unlock();
    return SGD::step(std::move(closure));
  }
  static inline int limit_ms = 0;
};
int begin_to_meet(int limit_ms) {
  std::lock_guard lock(meeting.mutex);
  Meets::limit_ms = limit_ms;
  return std::exchange(meeting.most_inside, 0);
}
// A small convolutional network that lies whole on a parameter server.
struct Net : torch::nn::Module {
  Net()
      : conv(register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).stride(2)))),
        out(register_module("out", torch::nn::Linear(4 * 3 * 3, 2))) {
    torch::NoGradGuard off;
    for (auto& parameter : parameters())
      parameter.copy_(at::linspace(-0.3, 0.3, parameter.numel()).view(parameter.sizes()));
  }
  at::Tensor forward(at::Tensor x) { return torch::log_softmax(out(conv(x).relu().flatten(1)), 1); }
  std::vector<RRef<at::Tensor>> parameter_references() {
    std::vector<RRef<at::Tensor>> all;
    for (const auto& parameter : parameters()) all.push_back(RRef<at::Tensor>(parameter));
    return all;
  }
  std::size_t gradients() { return AutogradContext::current().gradients().size(); }
  torch::nn::Conv2d conv;
  torch::nn::Linear out;
};

// Releases a context as its worker does after it has lost the context's creator.
void give_up(std::uint64_t context) {
  autograd::contexts_of(*call::current_call("give_up()").core())
      .release(context, "the test says so");
}

}  // namespace optimized

namespace weft {
namespace {

using namespace harness;
using optimized::Layer;

class DistributedSteps : public testing::TestWithParam<Setting> {};

struct Two {
  Two(rpc::Agent& agent, const at::Tensor& one, const at::Tensor& two)
      : first(agent.remote<Layer>(after(agent, 1), one)),
        second(agent.remote<Layer>(after(agent, 2), two)) {}
  std::vector<RRef<at::Tensor>> parameters() const {
    return {first.sync<&Layer::parameter>(), second.sync<&Layer::parameter>()};
  }
  at::Tensor forward(const at::Tensor& x) const {
    return second.sync<&Layer::forward>(first.sync<&Layer::forward>(x));
  }
  RRef<Layer> first, second;
};

// Expects that O on the workers gives the same weights, except for rounding, as Local in one
// process.
template <class Local, class O = Local, class Options>
void equals_local(rpc::Agent& agent, const Options& options) {
  const auto one = at::rand({3, 3}), two = at::rand({3, 3}), x = at::rand({2, 3});
  Layer local_one(one), local_two(two);
  Local local({local_one.weight, local_two.weight}, options);
  const Two model(agent, one, two);
  DistributedOptimizer<O> optimizer(model.parameters(), options);
  for (int i = 0; i < 3; ++i) {
    local.zero_grad();
    local_two.forward(local_one.forward(x)).sum().backward();
    local.step();
    AutogradContext context(agent);
    context.backward({model.forward(x).sum()});
    optimizer.step(context);
    // A weight may come close to 0, where allclose() would demand exact equality.
    EXPECT_LT((model.first.template sync<&Layer::value>() - local_one.value())
                  .abs()
                  .max()
                  .template item<float>(),
              1e-6);
    EXPECT_LT((model.second.template sync<&Layer::value>() - local_two.value())
                  .abs()
                  .max()
                  .template item<float>(),
              1e-6);
    EXPECT_FALSE(at::allclose(model.first.template sync<&Layer::value>(), one));
    EXPECT_TRUE(model.first.template sync<&Layer::grad_is_empty>());
  }
}

TEST_P(DistributedSteps, SgdEqualsLocal) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    equals_local<torch::optim::SGD>(agent, torch::optim::SGDOptions(0.05));
    equals_local<torch::optim::SGD>(
        agent, torch::optim::SGDOptions(1e-3).momentum(1).weight_decay(1).nesterov(true));
  });
}

TEST_P(DistributedSteps, OptimizersWithStateEqualLocal) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    equals_local<torch::optim::Adagrad>(agent, torch::optim::AdagradOptions(0.05));
    equals_local<torch::optim::Adam>(agent, torch::optim::AdamOptions(0.01).amsgrad(true));
    equals_local<torch::optim::AdamW>(agent, torch::optim::AdamWOptions(0.05).amsgrad(true));
    equals_local<torch::optim::RMSprop>(agent, torch::optim::RMSpropOptions(0.05));
  });
}

TEST_P(DistributedSteps, FusedOptimizersEqualLocal) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    equals_local<torch::optim::SGD, FusedSGD>(agent, torch::optim::SGDOptions(0.05));
    equals_local<torch::optim::SGD, FusedSGD>(
        agent, torch::optim::SGDOptions(1e-3).momentum(1).weight_decay(1).nesterov(true));
    equals_local<torch::optim::AdamW, FusedAdamW>(agent,
                                                  torch::optim::AdamWOptions(0.05).amsgrad(true));
  });
}

// The forward uses one of the worker's two parameters.
template <class O, class Options>
void leaves_no_state(rpc::Agent& agent, const Options& options) {
  const auto start = at::rand({3, 3});
  const auto used = agent.remote<Layer>(1, start), skipped = agent.remote<Layer>(1, start);
  DistributedOptimizer<optimized::TellsItsState<O>> optimizer(
      {used.template sync<&Layer::parameter>(), skipped.template sync<&Layer::parameter>()},
      options);
  for (int i = 0; i < 2; ++i) {
    AutogradContext context(agent);
    context.backward({used.template sync<&Layer::forward>(at::rand({2, 3})).sum()});
    optimizer.step(context);
    EXPECT_EQ(agent.sync<&optimized::states_of_last_step>(1), 1u) << "of two parameters";
    EXPECT_TRUE(at::equal(skipped.template sync<&Layer::value>(), start));
  }
  EXPECT_FALSE(at::equal(used.template sync<&Layer::value>(), start));
}

TEST_P(DistributedSteps, UnusedParametersGetNoState) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1);
    const auto adam = torch::optim::AdamWOptions(0.05).weight_decay(0.1);
    leaves_no_state<torch::optim::SGD>(agent, sgd);
    leaves_no_state<torch::optim::AdamW>(agent, adam);
    leaves_no_state<FusedSGD>(agent, sgd);
    leaves_no_state<FusedAdamW>(agent, adam);
  });
}

TEST_P(DistributedSteps, UnusedParametersStayUnchanged) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::rand({3, 3});
    const Two model(agent, one, one);
    DistributedOptimizer<torch::optim::SGD> optimizer(
        model.parameters(), torch::optim::SGDOptions(0.05).weight_decay(1));
    AutogradContext context(agent);
    context.backward({model.first.sync<&Layer::forward>(at::rand({2, 3})).sum()});
    optimizer.step(context);
    EXPECT_FALSE(at::equal(model.first.sync<&Layer::value>(), one));
    EXPECT_TRUE(at::equal(model.second.sync<&Layer::value>(), one));
    context.release();
    EXPECT_EQ(error_of([&] { optimizer.step(context); }).blame(), Blame::Caller);
  });
}

// Runs with one transport only: the retries of the dropped messages take time, and the transport
// does not matter.
TEST(DistributedStep, MissingGradientsAreReported) {
  rpc::Options options;
  options.faults.drop.insert(
      rpc::MessageKind::ContextCleanup);  // the trainer keeps its own context
  run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        const auto one = at::rand({3, 3});
        const Two model(agent, one, one);
        DistributedOptimizer<torch::optim::SGD> optimizer(model.parameters(),
                                                          torch::optim::SGDOptions(0.05));
        AutogradContext context(agent);
        context.backward({model.first.sync<&Layer::forward>(at::rand({2, 3})).sum()});
        agent.sync<&optimized::give_up>(after(agent, 1), context.id());
        const auto error = error_of([&] { optimizer.step(context); });
        EXPECT_NE(error.text().find("it has not stepped"), std::string::npos) << error.text();
        EXPECT_TRUE(at::equal(model.first.sync<&Layer::value>(), one));
      },
      options);
}

TEST(DistributedStep, ErrorNamesTheRankOfALostOwner) {
  static std::atomic<bool> is_made, has_left;
  is_made = has_left = false;
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank == 1) {
      EXPECT_TRUE(comes_true([] { return is_made.load(); }));
    } else {
      const auto layer = agent.remote<Layer>(1, at::rand({3, 3}));
      DistributedOptimizer<torch::optim::SGD> optimizer({layer.sync<&Layer::parameter>()},
                                                        torch::optim::SGDOptions(0.05));
      is_made = true;
      EXPECT_TRUE(comes_true([] { return has_left.load(); }));
      AutogradContext context(agent);
      const auto error = error_of([&] { optimizer.step(context); });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
      EXPECT_EQ(error.ranks(), std::vector<int>{1}) << error.text();
    }
    agent.leave();
    has_left = true;
  });
}

TEST_P(DistributedSteps, ErrorsOfAllOwnersArriveAsOne) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const Two model(agent, at::rand({3, 3}), at::rand({3, 3}));
    const auto parameters = model.parameters();
    DistributedOptimizer<optimized::ThrowsOnStep> optimizer(parameters,
                                                            torch::optim::SGDOptions(0.05));
    AutogradContext context(agent);
    context.backward({model.forward(at::rand({2, 3})).sum()});
    const auto error = error_of([&] { optimizer.step(context); });
    const auto other = error_of([&] {
      DistributedOptimizer<optimized::ThrowsOnConstruction> broken(parameters,
                                                                   torch::optim::SGDOptions(0.05));
    });
    for (const auto& owner : {after(agent, 1), after(agent, 2)}) {
      EXPECT_NE(error.text().find(owner.name + " (rank " + std::to_string(owner.rank) +
                                  "): the step broke"),
                std::string::npos)
          << error.text();
      EXPECT_NE(other.text().find(owner.name), std::string::npos) << other.text();
    }
    EXPECT_NE(other.text().find("the constructor broke"), std::string::npos) << other.text();
    EXPECT_EQ(error.blame(), Blame::Remote);
    EXPECT_EQ(other.blame(), Blame::Remote);
    EXPECT_EQ(error_of([&] {
                DistributedOptimizer<torch::optim::SGD>({}, torch::optim::SGDOptions(0.05));
              }).blame(),
              Blame::Caller);
  });
}

TEST_P(DistributedSteps, LearningRateAndStateReachAllOwners) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::rand({3, 3}), two = at::rand({3, 3}), x = at::rand({2, 3});
    const Two model(agent, one, two), other(agent, one, two);
    using Optimizer = DistributedOptimizer<torch::optim::SGD>;
    const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
    Optimizer optimizer(model.parameters(), options), resumed(other.parameters(), options);
    const auto train = [&](const Two& net, const Optimizer& with) {
      AutogradContext context(agent);
      context.backward({net.forward(x).sum()});
      with.step(context);
    };
    train(model, optimizer);
    train(other, resumed);
    optimizer.set_lr(0.5);
    EXPECT_EQ(optimizer.lr(), 0.5);
    resumed.load(optimizer.save());
    EXPECT_EQ(resumed.lr(), 0.5);
    train(model, optimizer);
    train(other, resumed);
    EXPECT_TRUE(at::equal(model.first.sync<&Layer::value>(), other.first.sync<&Layer::value>()));
    EXPECT_TRUE(at::equal(model.second.sync<&Layer::value>(), other.second.sync<&Layer::value>()));
    EXPECT_EQ(error_of([&] { resumed.load({"nonsense"}); }).blame(), Blame::Caller);
    const std::string both = error_of([&] { resumed.load({"nonsense", "nonsense"}); }).text();
    const std::string one_of_them = "this is not the saved";
    const std::size_t first = both.find(one_of_them);
    ASSERT_NE(first, std::string::npos) << both;
    EXPECT_NE(both.find(one_of_them, first + 1), std::string::npos)
        << "every owner's error: " << both;
  });
}

TEST_P(DistributedSteps, LoadReplacesAllState) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto owner = after(agent, 1);
    const auto layer = agent.remote<Layer>(owner, at::zeros({3, 3}));
    const auto parameter = layer.sync<&Layer::parameter>();
    const auto options = torch::optim::SGDOptions(0.5).momentum(0.9);
    const DistributedOptimizer<torch::optim::SGD> optimizer({parameter}, options);
    const DistributedOptimizer<torch::optim::SGD> of_two(
        {parameter, agent.remote<Layer>(owner, at::zeros({3, 3})).sync<&Layer::parameter>()},
        options);
    const auto expect_after_a_step = [&](double value) {
      AutogradContext context(agent);
      context.backward({layer.sync<&Layer::forward>(at::ones({1, 3})).sum()});
      optimizer.step(context);
      EXPECT_TRUE(at::allclose(layer.sync<&Layer::value>(), at::full({3, 3}, value)))
          << layer.sync<&Layer::value>();
    };
    const auto unstepped = optimizer.save();
    expect_after_a_step(-0.5);
    optimizer.load(unstepped);
    expect_after_a_step(-1.0);  // no momentum
    const auto error = error_of([&] { optimizer.load(of_two.save()); });
    EXPECT_NE(error.text().find("different size"), std::string::npos) << error.text();
    expect_after_a_step(-1.95);  // with the momentum of the step before
  });
}

TEST_P(DistributedSteps, StepsMovedDataAndRefusesANewType) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto layer = agent.remote<Layer>(after(agent, 1), at::zeros({3, 3}));
    const DistributedOptimizer<torch::optim::SGD> optimizer(
        {layer.sync<&Layer::parameter>()}, torch::optim::SGDOptions(0.5).momentum(0.9));
    const auto step = [&](at::ScalarType type) {
      AutogradContext context(agent);
      context.backward({layer.sync<&Layer::forward>(at::ones({1, 3}, type)).sum()});
      optimizer.step(context);
    };
    step(at::kFloat);
    layer.sync<&Layer::move>();
    step(at::kFloat);
    const auto expected = at::full({3, 3}, -1.45);  // with the momentum of the step before
    EXPECT_TRUE(at::allclose(layer.sync<&Layer::value>(), expected)) << layer.sync<&Layer::value>();
    layer.sync<&Layer::widen>();
    const auto error = error_of([&] { step(at::kDouble); });
    for (const std::string part :
         {"parameter 0 of 1 here is Double [3, 3] on cpu, and was Float [3, 3] on cpu",
          "then make the optimizer"}) {
      EXPECT_NE(error.text().find(part), std::string::npos) << part << " in " << error.text();
    }
    EXPECT_TRUE(at::allclose(layer.sync<&Layer::value>(), expected.to(at::kDouble)));
  });
}

TEST_P(DistributedSteps, ManyTrainersStepAtOnce) {
  for (const StepOrder order : {StepOrder::Locked, StepOrder::Hogwild}) {
    run_workers(GetParam(), [order](rpc::Agent& agent) {
      // Every worker trains its own layer on worker 0, so no step is lost in either order.
      const auto start = at::zeros({3, 3});
      const auto layer = agent.remote<Layer>(0, start);
      DistributedOptimizer<torch::optim::SGD> optimizer(
          {layer.sync<&Layer::parameter>()}, torch::optim::SGDOptions(0.5), {.order = order});
      for (int i = 0; i < 10; ++i) {
        AutogradContext context(agent);
        context.backward({layer.sync<&Layer::forward>(at::ones({1, 3})).sum()});
        optimizer.step(context);
      }
      EXPECT_TRUE(at::allclose(layer.sync<&Layer::value>(), at::full({3, 3}, -5.0)));
    });
  }
}

// Runs another trainer's forward, backward and step between a trainer's forward and its backward,
// which needs the weight. Returns that backward's error.
template <class O, class Options>
std::string error_of_backward_behind_another_step(rpc::Agent& agent, const Options& options) {
  const auto layer = agent.remote<Layer>(1, at::ones({3, 3}));
  DistributedOptimizer<O> optimizer({layer.sync<&Layer::parameter>()}, options);
  const auto forward = [&] {
    return layer.sync<&Layer::forward>(at::ones({1, 3}).requires_grad_()).sum();
  };
  AutogradContext context(agent);
  const auto loss = forward();
  std::thread([&] {
    AutogradContext other(agent);
    other.backward({forward()});
    optimizer.step(other);
  }).join();
  try {
    context.backward({loss});
  } catch (const Error& error) {
    return error.text();
  }
  return "";
}

TEST_P(DistributedSteps, FailedBackwardNamesTheOtherStep) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto expect_told = [](const std::string& error, const char* optimizer) {
      for (const char* part : {"modified by an inplace operation",
                               "; another trainer's step did it: ", " of rank 0 changed weights",
                               "take turns", "torch::optim::SGD"})
        EXPECT_NE(error.find(part), std::string::npos)
            << optimizer << ": " << part << " in " << error;
    };
    using namespace torch::optim;
    expect_told(error_of_backward_behind_another_step<Adagrad>(agent, AdagradOptions(0.1)),
                "Adagrad");
    expect_told(error_of_backward_behind_another_step<RMSprop>(agent, RMSpropOptions(0.1)),
                "RMSprop");
    expect_told(error_of_backward_behind_another_step<Adam>(agent, AdamOptions(0.1)), "Adam");
    expect_told(error_of_backward_behind_another_step<AdamW>(agent, AdamWOptions(0.1)), "AdamW");
    EXPECT_EQ(error_of_backward_behind_another_step<SGD>(agent, SGDOptions(0.1)), "")
        << "its backward uses the new weights";
  });
}

TEST_P(DistributedSteps, OwnStepIsNotBlamedOnAnother) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto layer = agent.remote<Layer>(1, at::ones({3, 3}));
    DistributedOptimizer<torch::optim::Adam> optimizer({layer.sync<&Layer::parameter>()},
                                                       torch::optim::AdamOptions(0.1));
    {
      AutogradContext earlier(agent);  // has ended before the next one begins
      earlier.backward({layer.sync<&Layer::forward>(at::ones({1, 3}).requires_grad_()).sum()});
      optimizer.step(earlier);
    }
    AutogradContext context(agent);
    const auto loss = layer.sync<&Layer::forward>(at::ones({1, 3}).requires_grad_()).sum();
    context.backward({loss}, {.retain_graph = true});
    optimizer.step(context);
    const auto error = error_of([&] { context.backward({loss}); });
    EXPECT_NE(error.text().find("modified by an inplace operation"), std::string::npos)
        << error.text();
    EXPECT_EQ(error.text().find("another trainer"), std::string::npos) << error.text();
  });
}

TEST_P(DistributedSteps, OnlyHogwildStepsOverlap) {
  for (const StepOrder order : {StepOrder::Locked, StepOrder::Hogwild}) {
    run_workers(GetParam(), [order](rpc::Agent& agent) {
      if (agent.self().rank != 0) return;
      const bool overlaps = order == StepOrder::Hogwild;
      agent.sync<&optimized::begin_to_meet>(1, overlaps ? 30'000 : 100);
      std::vector<std::thread> trainers;
      for (int i = 0; i < 2; ++i) {
        trainers.emplace_back([&agent, order] {
          const auto layer = agent.remote<Layer>(1, at::zeros({3, 3}));
          DistributedOptimizer<optimized::Meets> optimizer(
              {layer.sync<&Layer::parameter>()}, torch::optim::SGDOptions(0.5), {.order = order});
          AutogradContext context(agent);
          context.backward({layer.sync<&Layer::forward>(at::ones({1, 3})).sum()});
          optimizer.step(context);
          EXPECT_TRUE(at::allclose(layer.sync<&Layer::value>(), at::full({3, 3}, -0.5)));
        });
      }
      for (auto& trainer : trainers) trainer.join();
      EXPECT_EQ(agent.sync<&optimized::begin_to_meet>(1, 0), overlaps ? 2 : 1);
    });
  }
}

TEST_P(DistributedSteps, StepQueuesBehindABackward) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::rand({3, 3}), x = at::rand({2, 3});
    Layer local(one);
    torch::optim::SGD by_hand({local.weight}, torch::optim::SGDOptions(0.05));
    local.forward(x).sum().backward();
    by_hand.step();
    const auto layer = agent.remote<Layer>(after(agent, 1), one);
    DistributedOptimizer<torch::optim::SGD> optimizer({layer.sync<&Layer::parameter>()},
                                                      torch::optim::SGDOptions(0.05));
    {
      AutogradContext context(agent);
      const auto backward = context.backward_async({layer.sync<&Layer::forward>(x).sum()});
      optimizer.step_async(context).get();
      EXPECT_TRUE(backward.done());
    }
    EXPECT_TRUE(at::allclose(layer.sync<&Layer::value>(), local.value()));
  });
}

TEST_P(DistributedSteps, ParameterServerLearns) {
  if (GetParam().workers != 2) GTEST_SKIP() << "two workers: a trainer and a server";
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    torch::manual_seed(3);
    const auto net = agent.remote<optimized::Net>(1);
    DistributedOptimizer<torch::optim::SGD> optimizer(
        net.sync<&optimized::Net::parameter_references>(), torch::optim::SGDOptions(0.1));
    // The network learns whether the upper or the lower half of an image is brighter.
    double last = 1e9;
    for (int check = 0; check < 4; ++check) {
      double loss_here = 0;
      for (int batch = 0; batch < 12; ++batch) {
        const auto labels = at::randint(0, 2, {16}, at::kLong);
        auto images = at::rand({16, 1, 8, 8});
        for (int i = 0; i < 16; ++i) images[i].narrow(1, labels[i].item<int>() * 4, 4) += 1;
        AutogradContext context(agent);
        const at::Tensor loss = torch::nll_loss(net.sync<&optimized::Net::forward>(images), labels);
        context.backward({loss});
        EXPECT_EQ(net.sync<&optimized::Net::gradients>(), 4u);
        optimizer.step(context);
        loss_here += loss.item<double>();
      }
      EXPECT_LT(loss_here, last);
      last = loss_here;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Optim, DistributedSteps, testing::ValuesIn(autograd_settings()),
                         setting_name);

}  // namespace
}  // namespace weft
