// SPDX-License-Identifier: Apache-2.0
// Tests that steps of a DistributedOptimizer on GPUs keep stream order. The workers of this process
// share one GPU of the fake driver. libtorch has no kernels there, so a step copies, and a gradient
// is filled.
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/optim/sgd.h>

#include <weft/cuda/memory.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rpc/init.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/optim.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/harness/lent_devices.h>
#include <weft/tests/harness/ranks.h>

namespace steps_on_gpu {

using namespace weft;

// Used by the functions that are called remotely.
harness::FakeDriver* fake = nullptr;
harness::FakeTorchCuda* torch_cuda = nullptr;
c10::Stream* slow = nullptr;            // gradients are computed on it; the test holds it back
std::atomic<c10::StreamId> stepped_on;  // the stream of the last step

c10::Stream current() { return torch_cuda->current(0); }
void fill(const at::Tensor& tensor, int byte) {
  cuda::fill(torch_cuda->view(current()), tensor::slice_of(tensor),
             static_cast<unsigned char>(byte));
}

// Fills the weight's gradient with a one in every byte; with is_slow, when the slow stream reaches
// it.
struct Weighted : torch::autograd::Function<Weighted> {
  static at::Tensor forward(torch::autograd::AutogradContext* graph, at::Tensor x,
                            at::Tensor weight, bool is_slow) {
    graph->saved_data["elements"] = weight.numel();
    graph->saved_data["is_slow"] = is_slow;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* graph,
                                                 torch::autograd::variable_list gradients) {
    const bool is_slow = graph->saved_data["is_slow"].toBool();
    at::Tensor gradient;
    {
      const c10::StreamGuard on(is_slow ? *slow : current());
      gradient = torch_cuda->empty({graph->saved_data["elements"].toInt()}, at::kFloat);
      fill(gradient, 1);
    }
    auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
    if (is_slow) devices->wait(devices->recorded(*slow), current());
    return {gradients[0] * 2, gradient, at::Tensor()};
  }
};

// A step copies each gradient into its weight.
struct Copying : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure) override {
    for (auto& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        stepped_on = current().id();
        cuda::copy(torch_cuda->view(current()), tensor::slice_of(parameter),
                   tensor::slice_of(parameter.grad()));
      }
    }
    return {};
  }
};

// Saving copies the weight, and loading fills it with twos, both on the current stream.
at::Tensor* what_is_saved = nullptr;
struct Keeping : Copying {
  using Copying::Copying;
  at::Tensor weight() const { return param_groups()[0].params()[0]; }
  void save(torch::serialize::OutputArchive&) const override {
    cuda::copy(torch_cuda->view(current()), tensor::slice_of(*what_is_saved),
               tensor::slice_of(weight()));
  }
  void load(torch::serialize::InputArchive&) override { fill(weight(), 2); }
};

// Makes a weight that every stream may use, because its allocation has finished.
at::Tensor make_weight() {
  at::Tensor weight = torch_cuda->empty({16}, at::kFloat);
  auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
  EXPECT_TRUE(devices->ready(weight.device()).synchronize(Deadline::in(std::chrono::seconds(20))));
  std::memset(weight.mutable_data_ptr(), 0, weight.nbytes());
  return weight.set_requires_grad(true);
}
at::Tensor use(at::Tensor x, RRef<at::Tensor> weight, bool is_slow) {
  return Weighted::apply(x, weight.local_value(), is_slow);
}
// Reads the bytes at once, as a stream that waits for nothing would.
bool is_full_of(const at::Tensor& tensor, int value) {
  const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
  return std::all_of(bytes, bytes + tensor.nbytes(), [value](char byte) { return byte == value; });
}
bool is_stepped(RRef<at::Tensor> weight) { return is_full_of(weight.local_value(), 1); }
bool is_loaded(RRef<at::Tensor> weight) { return is_full_of(weight.local_value(), 2); }
int plus(int a, int b) { return a + b; }

}  // namespace steps_on_gpu

namespace weft {
namespace {

using namespace std::chrono_literals;
using namespace steps_on_gpu;
using harness::FakeDriver;
using harness::FakeTorchCuda;

const torch::optim::SGDOptions kOptions(1.0);

class StepOnCuda : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>(FakeDriver::Options{.threads = true});
    torch_ = std::make_unique<FakeTorchCuda>(*fake_);
    fake = fake_.get();
    torch_cuda = torch_.get();
    own_.emplace(torch_->new_stream());
    slow = &*own_;
    fake_->hold(torch_->view(*slow));
  }
  void TearDown() override {
    lent_.wait_until_given_back();
    slow = nullptr;
    torch_cuda = nullptr;
    fake = nullptr;
  }

  // Worker 1 has one thread, so it runs and answers calls in the order in which they arrive.
  void run(const std::function<void(rpc::Agent&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(2, [&](int rank) {
      rpc::Options options{.rank = rank,
                           .world_size = 2,
                           .store = store,
                           .worker_threads = rank == 1 ? 1 : 16,
                           .timeout = 20s};
      options.transports = {GetParam()};
      const c10::Device gpu(c10::kCUDA, 0);
      if (rank == 0) options.device_maps = {{"worker1", {{gpu, gpu}}}};
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options, lent_.lend(*fake_));
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = 30s});
    });
  }
  void go_on() { fake_->release(torch_->view(*slow)); }
  // Returns when all replies that worker 1 gives without waiting for the GPU have arrived.
  static void hear_all(rpc::Agent& agent) {
    for (int round = 0; round < 3; ++round) EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
  }
  static void wait_for_copies(int copies) {
    while (fake->calls(&cuda::Driver::memcpy_async) < copies) std::this_thread::yield();
  }

  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
  std::optional<c10::Stream> own_;
  harness::LentDevices lent_;
};

TEST_P(StepOnCuda, IsDoneWhenTheWeightsAreReady) {
  for (const bool is_queued : {false, true}) {
    fake->hold(torch_->view(*slow));
    run([&](rpc::Agent& agent) {
      const auto weight = agent.remote<&make_weight>("worker1");
      const DistributedOptimizer<Copying> optimizer({weight}, kOptions);
      AutogradContext context(agent);
      const at::Tensor loss = agent.sync<&use>("worker1", at::ones({2}), weight, true).sum();
      const auto pass = context.backward_async({loss});
      if (!is_queued) pass.get();
      const int copies = fake->calls(&cuda::Driver::memcpy_async);
      const auto step = optimizer.step_async(context);
      wait_for_copies(copies + 1);
      hear_all(agent);
      EXPECT_TRUE(pass.done()) << "the host waits for no gradient";
      EXPECT_FALSE(step.done()) << "its gradient is not ready yet";
      EXPECT_NE(stepped_on, 0) << "the step ran on the default stream";
      fake->hold(&cuda::Driver::memcpy_async);
      go_on();
      hear_all(agent);
      EXPECT_FALSE(step.done()) << "the weights are not ready yet";
      fake->release(&cuda::Driver::memcpy_async);
      step.get();
      EXPECT_TRUE(agent.sync<&is_stepped>("worker1", weight));
    });
  }
}

TEST_P(StepOnCuda, OnlyHogwildStepsOverlap) {
  for (const auto order : {StepOrder::Locked, StepOrder::Hogwild}) {
    fake->hold(torch_->view(*slow));
    run([&](rpc::Agent& agent) {
      const auto first = agent.remote<&make_weight>("worker1"),
                 second = agent.remote<&make_weight>("worker1");
      const DistributedOptimizer<Copying> one({first}, kOptions, {.order = order}),
          other({second}, kOptions, {.order = order});
      AutogradContext context(agent);
      context.backward({agent.sync<&use>("worker1", at::ones({2}), first, true).sum() +
                        agent.sync<&use>("worker1", at::ones({2}), second, false).sum()});
      const int copies = fake->calls(&cuda::Driver::memcpy_async);
      const auto before = one.step_async(context);
      wait_for_copies(copies + 1);
      const auto after = other.step_async(context);
      wait_for_copies(copies + 2);
      hear_all(agent);
      if (order == StepOrder::Hogwild) after.get();
      EXPECT_EQ(after.done(), order == StepOrder::Hogwild);
      EXPECT_EQ(agent.sync<&is_stepped>("worker1", second), order == StepOrder::Hogwild);
      EXPECT_FALSE(before.done());
      go_on();
      before.get();
      after.get();
      EXPECT_TRUE(agent.sync<&is_stepped>("worker1", first));
      EXPECT_TRUE(agent.sync<&is_stepped>("worker1", second));
    });
  }
}

TEST_P(StepOnCuda, LocalStepFollowsTheCallersStream) {
  run([&](rpc::Agent& agent) {
    const RRef<at::Tensor> weight(agent, make_weight());
    const DistributedOptimizer<Copying> optimizer({weight}, kOptions);
    const c10::Stream side = torch_->new_stream();
    const c10::StreamGuard on(side);
    AutogradContext context(agent);
    context.backward({Weighted::apply(at::ones({2}), weight.local_value(), true).sum()});
    optimizer.step(context);
    EXPECT_EQ(stepped_on, side.id());
    EXPECT_GT(fake->pending(torch_->view(side)), 0U) << "the host has not waited";
    EXPECT_FALSE(is_stepped(weight));
    go_on();
    while (fake->pending(torch_->view(side)) > 0) std::this_thread::yield();
    EXPECT_TRUE(is_stepped(weight));
  });
}

TEST_P(StepOnCuda, SaveAndLoadFollowTheStep) {
  for (const auto order : {StepOrder::Locked, StepOrder::Hogwild}) {
    for (const bool loads : {false, true}) {
      fake->hold(torch_->view(*slow));
      at::Tensor saved = make_weight();
      what_is_saved = &saved;
      run([&](rpc::Agent& agent) {
        const auto weight = agent.remote<&make_weight>("worker1");
        const DistributedOptimizer<Keeping> optimizer({weight}, kOptions, {.order = order});
        std::vector<std::string> states;
        if (loads) states = optimizer.save();
        AutogradContext context(agent);
        context.backward({agent.sync<&use>("worker1", at::ones({2}), weight, true).sum()});
        const int copies = fake->calls(&cuda::Driver::memcpy_async);
        const auto step = optimizer.step_async(context);
        wait_for_copies(copies + 1);
        if (loads) {
          optimizer.load(states);
        } else {
          optimizer.save();
        }
        hear_all(agent);
        EXPECT_FALSE(step.done()) << "the host has not waited";
        EXPECT_FALSE(loads && agent.sync<&is_loaded>("worker1", weight))
            << "the load must follow the step";
        go_on();
        step.get();
        while (fake->pending() > 0) std::this_thread::yield();
        EXPECT_TRUE(loads ? agent.sync<&is_loaded>("worker1", weight) : is_full_of(saved, 1));
      });
      what_is_saved = nullptr;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optim, StepOnCuda, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace
}  // namespace weft
