// SPDX-License-Identifier: Apache-2.0
// Tests passes whose tensors lie on GPUs, over the fake driver. No host waits between the kernel
// that computes a gradient on one worker and the kernel that reads it on another; streams order
// them. Named operations on streams stand for the nodes' kernels. cuda_gpu_test.cc has passes that
// compute on a real GPU.
#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>

#include <gtest/gtest.h>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/autograd.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rpc/init.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/tests/engine/autograd/settings.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/harness/lent_devices.h>

namespace on_cuda {

using namespace weft;
using namespace std::chrono_literals;

constexpr std::int64_t kElements = 64;

// Used by the functions that are called remotely.
harness::FakeDriver* fake = nullptr;
harness::FakeTorchCuda* torch_cuda = nullptr;
// Memory is freed in the order of its own stream, and the fake allocator does not see which other
// streams read it. So the inputs of kernels are kept until the test has ended.
std::mutex mutex;
std::vector<at::Tensor> kept;

// Enqueues the kernel on the current stream.
at::Tensor product(const char* kernel, const at::Tensor& a, float factor) {
  const at::Tensor result = torch_cuda->empty({kElements}, at::kFloat);
  {
    std::lock_guard lock(mutex);
    kept.push_back(a);
  }
  const auto* from = static_cast<const float*>(a.const_data_ptr());
  float* to = result.mutable_data_ptr<float>();
  const auto body = [from, to, factor] {
    std::transform(from, from + kElements, to, [=](float x) { return x * factor; });
  };
  EXPECT_EQ(fake->enqueue(torch_cuda->view(torch_cuda->current()).native(), kernel, body),
            CUDA_SUCCESS);
  return result;
}
void wait_for(const at::Tensor& tensor) {
  auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
  EXPECT_TRUE(devices->ready(tensor.device()).synchronize(Deadline::in(20s)));
}
// Returns a tensor that every stream may use, because its allocation has finished.
at::Tensor filled(float value) {
  const at::Tensor tensor = torch_cuda->empty({kElements}, at::kFloat);
  wait_for(tensor);
  std::fill_n(tensor.mutable_data_ptr<float>(), kElements, value);
  return tensor;
}
bool is_all(const at::Tensor& tensor, float value) {
  const auto* data = static_cast<const float*>(tensor.const_data_ptr());
  return std::all_of(data, data + tensor.numel(), [=](float x) { return x == value; });
}

struct Here : torch::autograd::Function<Here> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    return product("forward here", x, 2);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {product("backward here", gradients[0], 2)};
  }
};
// The streams of the last There node, for the test.
std::optional<c10::Stream> forward_there, backward_there;
struct There : torch::autograd::Function<There> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    forward_there = torch_cuda->current();
    return product("forward there", x, 3);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    backward_there = torch_cuda->current();
    return {product("backward there", gradients[0], 3)};
  }
};
at::Tensor there(at::Tensor x) { return There::apply(x); }
// A weight of the called worker.
at::Tensor weight;
at::Tensor of_weight() { return There::apply(weight); }
// Reads the gradient on this call's own streams, without waiting for them.
at::Tensor copied;
void copy_gradient() {
  copied = product("read the gradient", AutogradContext::current().gradient(weight), 1);
}
int plus(int a, int b) { return a + b; }

}  // namespace on_cuda

namespace weft {
namespace {

using namespace on_cuda;
using harness::comes_true;
using harness::FakeDriver;
using harness::FakeTorchCuda;

class BackwardOnCuda : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>(
        FakeDriver::Options{.devices = 1, .threads = true, .is_two_processes = is_ipc()});
    torch_ = std::make_unique<FakeTorchCuda>(
        *fake_, is_ipc() ? FakeTorchCuda::Memory::Shareable : FakeTorchCuda::Memory::Pooled);
    fake = fake_.get();
    torch_cuda = torch_.get();
    ASSERT_EQ(at::getAccelerator(), c10::kCUDA) << "nodes would have no streams";
    weight = filled(1).requires_grad_();
  }
  void TearDown() override {
    if (!fake_) return;
    EXPECT_TRUE(comes_true([&] { return fake_->pending() == 0; }));
    weight = copied = at::Tensor();
    kept.clear();
    forward_there = backward_there = std::nullopt;
    lent_.wait_until_given_back();
    EXPECT_TRUE(comes_true([&] { return fake_->pending() == 0; }));
    torch_cuda = nullptr;
    fake = nullptr;
  }

  static bool is_ipc() { return GetParam() == std::string_view("cuda_ipc"); }
  // Two workers that share a GPU; worker0 runs the body. Worker1 has one thread: if that waited for
  // the GPU, worker1 would answer nothing else.
  void run(const std::function<void(rpc::Agent&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const c10::Device gpu(c10::kCUDA, 0);
    harness::run_threads(2, [&](int rank) {
      rpc::Options options{.rank = rank,
                           .world_size = 2,
                           .store = store,
                           .worker_threads = rank == 1 ? 1 : 16,
                           .timeout = 20s};
      options.transports = {is_ipc() ? "shm" : GetParam()};
      options.device_maps = {{"worker" + std::to_string(1 - rank), {{gpu, gpu}}}};
      rpc::Agent agent =
          rpc::init("worker" + std::to_string(rank), options,
                    lent_.lend(*fake_, is_ipc() ? harness::other_process(rank) : nullptr));
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = 30s});
    });
  }
  // Returns when worker1 has done everything that does not wait for the GPU.
  static void hear_all(rpc::Agent& agent) {
    for (int round = 0; round < 3; ++round) EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
  }
  cuda::StreamRef view(const c10::Stream& stream) const { return torch_->view(stream); }
  bool has_run(const std::string& kernel) const {
    const auto all = fake_->executed();
    return std::find(all.begin(), all.end(), kernel) != all.end();
  }
  // Expects that each kernel ran once, in this order; others may have run between them.
  void expect_order(const std::vector<std::string>& kernels) const {
    const auto all = fake_->executed();
    auto last = all.begin();
    for (const auto& kernel : kernels) {
      EXPECT_EQ(std::count(all.begin(), all.end(), kernel), 1) << kernel;
      const auto found = std::find(all.begin(), all.end(), kernel);
      EXPECT_TRUE(last <= found) << kernel << " ran too early";
      last = found;
    }
  }

  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
  harness::LentDevices lent_;
};

TEST_P(BackwardOnCuda, PeersKernelFollowsOurs) {
  run([&](rpc::Agent& agent) {
    const at::Tensor x = filled(1).requires_grad_(), one = filled(1);
    AutogradContext context(agent);
    const c10::Stream side = torch_cuda->new_stream();
    at::Tensor root;
    {
      const c10::StreamGuard on(side);
      root = Here::apply(agent.sync<&there>("worker1", x));
      wait_for(root);
    }
    EXPECT_TRUE(is_all(root, 6));
    fake_->hold(view(side));
    fake_->delay(&cuda::Driver::launch_kernel,
                 100ms);  // time for a gradient to arrive that has not waited for its kernel
    const auto pass = context.backward_async({root}, {.grad_outputs = {one}});
    EXPECT_GT(fake_->pending(view(side)), 0u)
        << "a node's kernel is on the stream of its forward, and the host went on";
    if (is_ipc()) hear_all(agent);  // other transports hold it up behind that kernel's message
    EXPECT_FALSE(pass.done());
    EXPECT_FALSE(has_run("backward there")) << "it ran before the kernel that makes its gradient";
    fake_->release(view(side));
    pass.get();
    const at::Tensor gradient = context.gradient(x);
    wait_for(gradient);
    EXPECT_TRUE(is_all(gradient, 6));
    expect_order({"forward there", "forward here", "backward here", "backward there"});
  });
}

TEST_P(BackwardOnCuda, PeersNodeRunsOnItsForwardsStream) {
  run([&](rpc::Agent& agent) {
    const at::Tensor x = filled(1).requires_grad_(), one = filled(1);
    AutogradContext context(agent);
    const at::Tensor root = agent.sync<&there>("worker1", x);
    wait_for(root);
    fake_->hold(view(*forward_there));
    const auto pass = context.backward_async({root}, {.grad_outputs = {one}});
    EXPECT_TRUE(comes_true([&] { return fake_->pending(view(*forward_there)) > 0; }));
    hear_all(agent);
    EXPECT_FALSE(pass.done()) << "its gradient is not ready yet";
    fake_->release(view(*forward_there));
    pass.get();
    EXPECT_EQ(backward_there, forward_there);
    const at::Tensor gradient = context.gradient(x);
    wait_for(gradient);
    EXPECT_TRUE(is_all(gradient, 3));
  });
}

TEST_P(BackwardOnCuda, PassEndsBeforeItsKernels) {
  run([&](rpc::Agent& agent) {
    const at::Tensor one = filled(1);
    AutogradContext context(agent);
    const at::Tensor root = agent.sync<&of_weight>("worker1");
    wait_for(root);
    fake_->hold(view(*forward_there));
    context.backward({root}, {.grad_outputs = {one}});
    agent.sync<&copy_gradient>("worker1");
    hear_all(agent);
    EXPECT_FALSE(has_run("backward there") || has_run("read the gradient"));
    fake_->release(view(*forward_there));
    EXPECT_TRUE(comes_true([&] { return has_run("read the gradient"); }));
    EXPECT_TRUE(is_all(copied, 3));
    expect_order({"forward there", "backward there", "read the gradient"});
  });
}

INSTANTIATE_TEST_SUITE_P(Autograd, BackwardOnCuda,
                         testing::Values("inproc", "shm", "tcp", "cuda_ipc"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace
}  // namespace weft
