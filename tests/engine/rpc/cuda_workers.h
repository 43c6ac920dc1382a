// SPDX-License-Identifier: Apache-2.0
// Workers of this process that see the same four GPUs, of the fake driver, and functions to call on
// them. The fake driver has no kernels, so the functions only pass on, copy and fill tensors.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/cuda/memory.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rpc/init.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/rpc.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/harness/lent_devices.h>
#include <weft/tests/harness/ranks.h>

namespace weft::on_gpus {

using namespace std::chrono_literals;
using harness::error_of;
using harness::FakeDriver;
using harness::FakeTorchCuda;
using harness::LentDevices;

inline const c10::Device kHost(c10::kCPU);
inline c10::Device gpu(int index) {
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

// The fakes that called functions use.
inline FakeDriver* fake = nullptr;
inline FakeTorchCuda* torch_cuda = nullptr;

inline cuda::StreamRef current(int device) { return torch_cuda->view(torch_cuda->current(device)); }
// Writes `byte` everywhere, on the current stream.
inline void fill(const at::Tensor& tensor, int byte) {
  if (tensor.is_cuda()) {
    cuda::fill(current(tensor.device().index()), tensor::slice_of(tensor),
               static_cast<unsigned char>(byte));
  } else {
    std::memset(tensor.mutable_data_ptr(), byte, tensor.nbytes());
  }
}
inline at::Tensor made(const c10::Device& device, std::int64_t bytes, int byte) {
  const at::Tensor tensor = device.is_cpu() ? at::empty({bytes}, at::kByte)
                                            : torch_cuda->empty({bytes}, at::kByte, device.index());
  fill(tensor, byte);
  return tensor;
}
// Waits for the current stream, and returns whether all bytes of `tensor` are `byte`.
inline bool is_all(const at::Tensor& tensor, int byte) {
  if (tensor.is_cuda()) {
    auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
    EXPECT_TRUE(devices->ready(tensor.device()).synchronize(Deadline::in(20s)));
  }
  const auto* data = static_cast<const unsigned char*>(tensor.const_data_ptr());
  return std::all_of(data, data + tensor.nbytes(), [&](unsigned char one) { return one == byte; });
}

// Returns a view; libtorch's own function would need a CUDA kernel.
inline at::Tensor part_of(const at::Tensor& whole, std::int64_t begin, std::int64_t bytes) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(),
                                                   whole.dtype());
  impl->set_sizes_and_strides(at::IntArrayRef({bytes}), at::IntArrayRef({1}), begin);
  return at::Tensor(std::move(impl));
}

// Whether a CUDA context is current on this thread.
inline bool has_context() {
  CUcontext context = nullptr;
  fake->driver()->ctx_get_current(&context);
  return context != nullptr;
}

struct Seen {
  std::string device;
  bool right = false;
  bool on_own_stream = false;
  bool has_context = false;
  WEFT_FIELDS(device, right, on_own_stream, has_context)
};
inline Seen look_at(at::Tensor tensor, int byte) {
  const bool on_own_stream =
      tensor.is_cuda() && torch_cuda->current(tensor.device().index()).id() != 0;
  return {tensor.device().str(), is_all(tensor, byte), on_own_stream, has_context()};
}
inline Seen look_at_value(at::Tensor& value, int byte) { return look_at(value, byte); }
inline at::Tensor pass(at::Tensor tensor) { return tensor; }
// Returns both, and whether they share one storage here.
inline std::tuple<at::Tensor, at::Tensor, bool> pass_both(at::Tensor one, at::Tensor other) {
  return {one, other, one.storage().is_alias_of(other.storage())};
}
// The devices on which two tensors have arrived, and a new tensor on the device asked for.
struct TwoSeen {
  std::vector<std::string> devices;
  bool right = false;
  at::Tensor made;
  WEFT_FIELDS(devices, right, made)
};
inline TwoSeen look_at_both(at::Tensor one, at::Tensor other, c10::Device result) {
  return {{one.device().str(), other.device().str()},
          is_all(one, 1) && is_all(other, 2),
          made(result, 64, 3)};
}
inline at::Tensor make(c10::Device device, std::int64_t bytes, int byte) {
  return made(device, bytes, byte);
}
// Makes a tensor on each device; the first is filled with 1, the second with 2, ….
inline std::vector<at::Tensor> make_on(std::vector<c10::Device> devices) {
  std::vector<at::Tensor> tensors;
  for (const c10::Device& device : devices)
    tensors.push_back(made(device, 64, 1 + static_cast<int>(tensors.size())));
  return tensors;
}
inline int plus(int a, int b) { return a + b; }
inline at::Tensor fill_value(at::Tensor& value, int byte) {
  fill(value, byte);
  return value;
}

// A stream that a called function uses; the test holds it back.
inline c10::Stream* slow = nullptr;
inline at::Tensor make_slowly(at::Tensor like, int byte) {
  {
    const c10::StreamGuard on(*slow);
    fill(like, byte);
  }
  auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
  devices->wait(devices->recorded(*slow), torch_cuda->current(like.device().index()));
  return like;
}

inline at::Tensor make_slowly_at(rpc::WorkerInfo where, at::Tensor like, int byte) {
  return rpc::this_agent().sync<&make_slowly>(where, like, byte);
}
// Answers when a call has returned and its continuation has enqueued its work.
inline Future<at::Tensor> pass_and_fill_slowly(rpc::WorkerInfo where, at::Tensor tensor, int byte) {
  return rpc::this_agent().async<&pass>(where, tensor).then([byte](const at::Tensor& back) {
    return make_slowly(back, byte);
  });
}
// Can neither be copied nor sent. Each call runs on its own streams, which wait for the work that
// the call before has enqueued.
class Shelf {
 public:
  explicit Shelf(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  at::Tensor take() {
    std::lock_guard lock(mutex_);
    devices_->wait(filled_, tensor::CudaDevices::current_stream(tensor_.device()));
    return tensor_;
  }
  void write(int byte) {
    std::lock_guard lock(mutex_);
    fill(tensor_, byte);
    filled_ = devices_->ready(tensor_.device());
  }

 private:
  std::shared_ptr<tensor::CudaDevices> devices_ =
      std::make_shared<tensor::CudaDevices>(fake->driver());
  std::mutex mutex_;
  Fence filled_;
  at::Tensor tensor_;
};

class CudaRpc : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>(
        FakeDriver::Options{.devices = 4, .threads = true, .is_two_processes = is_ipc()});
    torch_ = std::make_unique<FakeTorchCuda>(
        *fake_, is_ipc() ? FakeTorchCuda::Memory::Shareable : FakeTorchCuda::Memory::Pooled);
    fake = fake_.get();
    torch_cuda = torch_.get();
  }
  void TearDown() override {
    lent_.wait_until_given_back();
    torch_cuda = nullptr;
    fake = nullptr;
  }

  static bool is_ipc() { return GetParam() == std::string_view("cuda_ipc"); }
  static const char* transport() { return is_ipc() ? "shm" : GetParam(); }
  static std::shared_ptr<const transport::cuda_ipc::Identity> process_of(int rank) {
    return is_ipc() ? harness::other_process(rank) : nullptr;
  }

  using Body = std::function<void(rpc::Agent&)>;
  using Map = std::vector<std::pair<c10::Device, c10::Device>>;
  // Each worker has `map` for the next worker; worker0 runs `body`.
  void run(const Map& map, const Body& body, int worker_threads = 16, int workers = 2) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(workers, [&](int rank) {
      rpc::Options options{.rank = rank,
                           .world_size = workers,
                           .store = store,
                           .worker_threads = worker_threads,
                           .timeout = 20s};
      options.transports = {transport()};
      if (rank + 1 < workers && !map.empty())
        options.device_maps = {{"worker" + std::to_string(rank + 1), map}};
      rpc::Agent agent =
          rpc::init("worker" + std::to_string(rank), options, lent_.lend(*fake_, process_of(rank)));
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = 30s});
    });
  }

  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
  LentDevices lent_;
};

}  // namespace weft::on_gpus
