// SPDX-License-Identifier: Apache-2.0
// Tests the fused optimizers on the fake GPU, whose kernels run the real kernels' code on the host
// when their stream reaches them. The fake has no kernels of libtorch, so steps that need them (new
// state, other layouts) are not tested.
#include <gtest/gtest.h>

#include <c10/core/StreamGuard.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <weft/cuda/device.h>
#include <weft/cuda/retire.h>
#include <weft/engine/optim/cuda_steps.h>
#include <weft/engine/optim/fused.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/kernels/fake_kernels.h>

namespace weft {
namespace {

using harness::FakeDriver;
using harness::FakeTorchCuda;

class FusedOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>();
    kernels::define_kernels(*fake_);
    torch_ = std::make_unique<FakeTorchCuda>(*fake_);
    steps_ =
        std::make_shared<optim::CudaSteps>(std::make_shared<tensor::CudaDevices>(fake_->driver()));
    torch::manual_seed(1);
  }
  void TearDown() override {
    if (fake_) fake_->run();
    steps_.reset();
    if (fake_) fake_->run();
  }

  // Copies values to the GPU. No stream is needed, because the host may write to the fake GPU's
  // memory.
  at::Tensor there(const at::Tensor& here) {
    const at::Tensor copy = torch_->empty(here.sizes(), here.scalar_type());
    std::memcpy(copy.mutable_data_ptr(), here.const_data_ptr(), here.nbytes());
    return copy;
  }
  static bool same_bytes(const at::Tensor& on_gpu, const at::Tensor& here) {
    return std::memcmp(on_gpu.const_data_ptr(), here.const_data_ptr(), here.nbytes()) == 0;
  }
  // Makes the state that `steps` steps with gradients of zero would leave.
  void make_state(FusedAdamW& optimizer, const at::Tensor& parameter, int steps) {
    const auto zeros = [&] {
      const at::Tensor here = at::zeros(parameter.sizes(), parameter.scalar_type());
      return parameter.is_cuda() ? there(here) : here;
    };
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->exp_avg(zeros());
    state->exp_avg_sq(zeros());
    state->max_exp_avg_sq(zeros());
    state->step(steps);
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  static std::int64_t steps_of(FusedAdamW& optimizer, const at::Tensor& parameter) {
    return static_cast<torch::optim::AdamWParamState&>(
               *optimizer.state().at(parameter.unsafeGetTensorImpl()))
        .step();
  }
  // Two parameters of different types, with gradients, on the host and on the GPU.
  struct Pair {
    std::vector<at::Tensor> here, there;
  };
  Pair parameters() {
    Pair pair;
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const at::Tensor value = torch::randn({33}).to(type), gradient = torch::randn({33}).to(type);
      pair.here.push_back(value.clone());
      pair.there.push_back(there(value));
      pair.here.back().mutable_grad() = gradient.clone();
      pair.there.back().mutable_grad() = there(gradient);
    }
    return pair;
  }

  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
  std::shared_ptr<optim::CudaSteps> steps_;
};

TEST_F(FusedOnCuda, SgdGivesTheCpusBitsInStreamOrder) {
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
  const Pair pair = parameters();
  FusedSGD here(pair.here, options), there(pair.there, options);
  there.step_by(steps_);
  for (std::size_t i = 0; i < pair.here.size(); ++i) {
    const at::Tensor momentum = torch::randn({33}).to(pair.here[i].scalar_type());
    for (const auto& [optimizer, parameter, buffer] :
         {std::tuple{&here, pair.here[i], momentum.clone()},
          std::tuple{&there, pair.there[i], this->there(momentum)}}) {
      auto state = std::make_unique<torch::optim::SGDParamState>();
      state->momentum_buffer(buffer);
      optimizer->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }
  for (int step = 0; step < 3; ++step) {
    const at::Tensor before = pair.here[0].clone();
    here.step();
    there.step();
    EXPECT_TRUE(same_bytes(pair.there[0], before)) << "the host has not waited";
    fake_->run();
    for (std::size_t i = 0; i < pair.here.size(); ++i)
      EXPECT_TRUE(same_bytes(pair.there[i], pair.here[i])) << i;
  }
}

TEST_F(FusedOnCuda, AdamWGivesTheCpusBits) {
  const auto options = torch::optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true);
  const Pair pair = parameters();
  FusedAdamW here(pair.here, options), there(pair.there, options);
  there.step_by(steps_);
  for (const at::Tensor& parameter : pair.there) {
    const at::Tensor zeros = at::zeros({33}, parameter.scalar_type());
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->exp_avg(this->there(zeros));
    state->exp_avg_sq(this->there(zeros));
    state->max_exp_avg_sq(this->there(zeros));
    there.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  for (int step = 0; step < 3; ++step) {
    here.step();
    there.step();
    fake_->run();
    for (std::size_t i = 0; i < pair.here.size(); ++i)
      EXPECT_TRUE(same_bytes(pair.there[i], pair.here[i])) << i;
  }
}

TEST_F(FusedOnCuda, StepsOnTwoStreamsKeepTheirOrder) {
  const Pair pair = parameters();
  FusedSGD here(pair.here, torch::optim::SGDOptions(0.1)),
      there(pair.there, torch::optim::SGDOptions(0.1));
  there.step_by(steps_);
  const at::Tensor before = pair.here[0].clone();
  here.step();
  here.step();
  there.step();
  const c10::Stream side = torch_->new_stream();
  {
    const c10::StreamGuard current(side);
    there.step();
  }
  fake_->run(torch_->view(side));
  EXPECT_TRUE(same_bytes(pair.there[0], before)) << "the second step ran before the first";
  fake_->run();
  EXPECT_TRUE(same_bytes(pair.there[0], pair.here[0]));
}

// A captured step runs only when its graph is launched, so the next step must follow the one before
// the capture.
TEST_F(FusedOnCuda, CapturedStepBetweenKeepsTheOrder) {
  const Pair pair = parameters();
  FusedSGD here(pair.here, torch::optim::SGDOptions(0.1)),
      there(pair.there, torch::optim::SGDOptions(0.1));
  there.step_by(steps_);
  const at::Tensor before = pair.here[0].clone();
  here.step();
  here.step();
  const c10::Stream first = torch_->new_stream(), second = torch_->new_stream();
  {
    const c10::StreamGuard current(first);
    there.step();
    FakeDriver::Graph graph;
    EXPECT_EQ(fake_->begin_capture(torch_->view(first)), CUDA_SUCCESS);
    there.step();
    EXPECT_EQ(fake_->end_capture(torch_->view(first), graph), CUDA_SUCCESS);
  }
  {
    const c10::StreamGuard current(second);
    there.step();
  }
  fake_->run(torch_->view(second));
  EXPECT_TRUE(same_bytes(pair.there[0], before)) << "the second step ran before the first";
  fake_->run();
  EXPECT_TRUE(same_bytes(pair.there[0], pair.here[0]));
}

TEST_F(FusedOnCuda, CapturedStepsKeepTheirOrder) {
  const Pair pair = parameters();
  FusedSGD here(pair.here, torch::optim::SGDOptions(0.1)),
      there(pair.there, torch::optim::SGDOptions(0.1));
  there.step_by(steps_);
  here.step();
  there.step();
  fake_->run();
  const at::Tensor before = pair.here[0].clone();
  for (int i = 0; i < 2; ++i) here.step();
  const c10::Stream first = torch_->new_stream(), second = torch_->new_stream();
  const auto devices = std::make_shared<tensor::CudaDevices>(fake_->driver());
  FakeDriver::Graph graph;
  bool may_go_on = false;
  EXPECT_EQ(fake_->begin_capture(torch_->view(first)), CUDA_SUCCESS);
  devices->wait(devices->recorded(first), second);  // makes `second` a part of the capture
  EXPECT_EQ(fake_->enqueue(
                torch_->view(first).native(), "what comes first", [] {}, [&] { return may_go_on; }),
            CUDA_SUCCESS);
  for (const c10::Stream& stream : {first, second}) {
    const c10::StreamGuard current(stream);
    there.step();
  }
  devices->wait(devices->recorded(second), first);
  EXPECT_EQ(fake_->end_capture(torch_->view(first), graph), CUDA_SUCCESS);
  EXPECT_EQ(fake_->launch(graph, torch_->view(first)), CUDA_SUCCESS);
  fake_->run();
  EXPECT_TRUE(same_bytes(pair.there[0], before)) << "the second step ran before the first";
  may_go_on = true;
  fake_->run();
  EXPECT_TRUE(same_bytes(pair.there[0], pair.here[0]));
}

// Optimizers live one after another, and at the same time, as in ZeRO, which has one for each
// shard.
TEST_F(FusedOnCuda, KernelsAreLoadedOnceAndUnloaded) {
  auto devices = std::make_shared<tensor::CudaDevices>(fake_->driver());
  const Pair pair = parameters();
  const auto step = [&] {
    auto optimizer =
        std::make_unique<FusedSGD>(std::vector{pair.there[0]}, torch::optim::SGDOptions(0.1));
    optimizer->step_by(std::make_shared<optim::CudaSteps>(devices));
    optimizer->step();
    return optimizer;
  };
  {
    const auto first = step(), second = step(), third = step();
    EXPECT_EQ(fake_->calls(&cuda::Driver::library_load_data), 1);
  }
  const std::weak_ptr<cuda::Device> device = devices->open(0);
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(fake_->calls(&cuda::Driver::library_load_data), 1) << "loaded kernels are used again";
  EXPECT_EQ(fake_->calls(&cuda::Driver::library_unload), 0)
      << "the end of an optimizer must not wait";
  fake_->run();
  step();
  EXPECT_LE(device.lock()->retirement().pending(), 2U)
      << "a step reclaims what earlier optimizers retired";
  fake_->run();
  devices->reclaim(Deadline::never());
  EXPECT_EQ(fake_->calls(&cuda::Driver::library_unload), 1);
  step();
  EXPECT_EQ(fake_->calls(&cuda::Driver::library_load_data), 2);
  fake_->run();
  devices->reclaim(Deadline::never());
  EXPECT_EQ(fake_->calls(&cuda::Driver::library_unload), 2);
  devices.reset();
  EXPECT_TRUE(device.expired());
}

TEST_F(FusedOnCuda, OptimizersShareTheOpenedGpus) {
  EXPECT_EQ(optim::CudaSteps().devices(), optim::CudaSteps().devices());
}

TEST_F(FusedOnCuda, BadGradientIsRefusedUpFront) {
  const Pair pair = parameters();
  pair.there[1].mutable_grad() = pair.here[1].grad();
  FusedSGD there(pair.there, torch::optim::SGDOptions(0.1));
  there.step_by(steps_);
  const at::Tensor before = pair.here[0].clone();
  try {
    there.step();
    FAIL() << "a gradient on another device was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("a gradient lies on cpu"), std::string::npos) << error.text();
  }
  fake_->run();
  EXPECT_TRUE(same_bytes(pair.there[0], before));
}

// Parameters with different step counts need separate launches.
TEST_F(FusedOnCuda, FailedLaunchKeepsEarlierLaunches) {
  Pair pair;
  for (int i = 0; i < 2; ++i) {
    const at::Tensor value = torch::randn({33}), gradient = torch::randn({33});
    pair.here.push_back(value.clone());
    pair.there.push_back(there(value));
    pair.here.back().mutable_grad() = gradient;
    pair.there.back().mutable_grad() = there(gradient);
  }
  FusedAdamW here(pair.here), there(pair.there);
  there.step_by(steps_);
  for (int i = 0; i < 2; ++i) {
    make_state(here, pair.here[static_cast<std::size_t>(i)], 1 + i);
    make_state(there, pair.there[static_cast<std::size_t>(i)], 1 + i);
  }
  const at::Tensor gradient = pair.here[1].grad();
  pair.here[1].mutable_grad() = at::Tensor();
  here.step();
  pair.here[1].mutable_grad() = gradient;
  fake_->fail(&cuda::Driver::launch_kernel, CUDA_ERROR_OUT_OF_MEMORY, 2);
  EXPECT_THROW(there.step(), Error);
  fake_->run();
  const auto expect_same = [&] {
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(steps_of(there, pair.there[i]), steps_of(here, pair.here[i])) << i;
      EXPECT_TRUE(same_bytes(pair.there[i], pair.here[i])) << i;
    }
  };
  expect_same();
  here.step();
  there.step();
  fake_->run();
  expect_same();
}

// Uses the widest parameters: fp64 with five arrays.
TEST_F(FusedOnCuda, StepsAreCountedLaunchByLaunch) {
  constexpr std::size_t kOfALaunch = optim::CudaSteps::kTensorsOfALaunch;
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i <= kOfALaunch; ++i) {
    parameters.push_back(there(at::ones({1}, at::kDouble)));
    parameters.back().mutable_grad() = there(at::ones({1}, at::kDouble));
  }
  FusedAdamW optimizer(parameters, torch::optim::AdamWOptions(0.1).amsgrad(true));
  optimizer.step_by(steps_);
  for (const at::Tensor& parameter : parameters) make_state(optimizer, parameter, 1);
  optimizer.step();
  EXPECT_EQ(fake_->calls(&cuda::Driver::launch_kernel), 2);
  fake_->fail(&cuda::Driver::launch_kernel, CUDA_ERROR_OUT_OF_MEMORY, 2);
  EXPECT_THROW(optimizer.step(), Error);
  for (std::size_t i = 0; i <= kOfALaunch; ++i)
    EXPECT_EQ(steps_of(optimizer, parameters[i]), i < kOfALaunch ? 3 : 2) << i;
  fake_->run();
}

// A launch of a graph repeats the captured step, so a step that differs from later ones must not be
// captured.
TEST_F(FusedOnCuda, OnlyRepeatableStepsAreCaptured) {
  const Pair pair = parameters();
  FusedSGD plain(pair.there, torch::optim::SGDOptions(0.1));
  FusedSGD momentum(pair.there, torch::optim::SGDOptions(0.1).momentum(0.9));
  FusedAdamW adamw(pair.there, torch::optim::AdamWOptions(0.1));
  for (auto* optimizer : {&plain, &momentum}) optimizer->step_by(steps_);
  adamw.step_by(steps_);
  const c10::Stream side = torch_->new_stream();
  const c10::StreamGuard current(side);
  const auto in_capture = [&](torch::optim::Optimizer& optimizer) -> std::string {
    FakeDriver::Graph graph;
    EXPECT_EQ(fake_->begin_capture(torch_->view(side)), CUDA_SUCCESS);
    std::string refused;
    try {
      optimizer.step();
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      refused = error.text();
    }
    EXPECT_EQ(fake_->end_capture(torch_->view(side), graph), CUDA_SUCCESS);
    if (refused.empty()) {
      EXPECT_EQ(fake_->launch(graph, torch_->view(side)), CUDA_SUCCESS);
    }
    fake_->run();
    return refused;
  };
  EXPECT_NE(in_capture(plain).find("its kernels are not loaded"), std::string::npos);
  plain.step();
  fake_->run();
  const auto* const data = static_cast<const float*>(pair.there[0].const_data_ptr());
  const std::vector<float> before(data, data + 33);
  EXPECT_EQ(in_capture(plain), "");
  EXPECT_NE(std::vector<float>(data, data + 33), before) << "the launch has stepped";
  EXPECT_NE(in_capture(momentum).find("its first step makes the momentum"), std::string::npos);
  for (const at::Tensor& parameter : pair.there) {
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(torch_->empty({33}, at::kDouble));
    momentum.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  EXPECT_NE(in_capture(momentum).find("its first step makes the momentum"), std::string::npos)
      << "the first step would convert the momentum";
  EXPECT_NE(in_capture(adamw).find("counts its steps on the host"), std::string::npos);
  EXPECT_TRUE(adamw.state().empty());
}

}  // namespace
}  // namespace weft
