// SPDX-License-Identifier: Apache-2.0
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/base/log.h>
#include <weft/cuda/device.h>
#include <weft/cuda/driver.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/span.h>
#include <weft/cuda/stream.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/transport/cuda_ipc/cuda_ipc.h>
#include <weft/transport/staged/staged_communicator.h>
#include <weft/transport/staged/staged_connection.h>

namespace weft::tensor {

namespace {

class StreamWork : public detail::DeviceWork {
 public:
  StreamWork(std::shared_ptr<CudaDevices> devices, c10::Device device, std::vector<Fence> fences)
      : devices_(std::move(devices)), device_(device), fences_(std::move(fences)) {}

  std::vector<c10::Device> devices() const override { return {device_}; }

  void wait() const override { wait_on(CudaDevices::current_stream(device_)); }

  detail::DeviceWorkRef run(const std::function<void()>& function) const override {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::Stream stream = guard.getStreamFromGlobalPool(device_);
    wait_on(stream);
    {
      const c10::StreamGuard current(stream);
      const ContextGuard context(*devices_, {stream});
      function();
    }
    return devices_->work(device_, {devices_->recorded(stream)});
  }

 private:
  void wait_on(const c10::Stream& stream) const {
    for (const Fence& fence : fences_) devices_->wait(fence, stream);
  }

  std::shared_ptr<CudaDevices> devices_;
  c10::Device device_;
  std::vector<Fence> fences_;
};

// Work that some streams have enqueued, and storages that were allocated for those streams.
class EnqueuedWork : public detail::DeviceWork {
 public:
  EnqueuedWork(std::shared_ptr<CudaDevices> devices, std::vector<c10::Stream> streams,
               std::vector<c10::Storage> storages)
      : devices_(std::move(devices)),
        streams_(std::move(streams)),
        storages_(std::move(storages)),
        done_(devices_->recorded(streams_)) {}

  std::vector<c10::Device> devices() const override {
    std::vector<c10::Device> devices;
    for (const c10::Stream& stream : streams_) devices.push_back(stream.device());
    return devices;
  }

  void wait() const override {
    for (const c10::Stream& stream : streams_)
      devices_->wait(done_, CudaDevices::current_stream(stream.device()));
    for (const c10::Storage& storage : storages_) {
      const c10::impl::VirtualGuardImpl guard(storage.device().type());
      guard.recordDataPtrOnStream(storage.data_ptr(), guard.getStream(storage.device()));
    }
  }

  detail::DeviceWorkRef run(const std::function<void()>& function) const override {
    {
      const c10::MultiStreamGuard current(streams_);
      const ContextGuard context(*devices_, streams_);
      function();
    }
    return devices_->work(streams_);
  }

 private:
  std::shared_ptr<CudaDevices> devices_;
  std::vector<c10::Stream> streams_;
  std::vector<c10::Storage> storages_;
  Fence done_;
};

c10::Device gpu(int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }

cuda::StreamRef view_of(cuda::Device& device, const c10::Stream& stream) {
  return {device, static_cast<CUstream>(stream.native_handle())};
}

}  // namespace

bool CudaDevices::built() { return true; }

int CudaDevices::count() {
  MutexLock lock(mutex_);
  return driver_ ? cuda::Device::count(*driver_) : cuda_device_count();
}

std::shared_ptr<cuda::Device> CudaDevices::open(int index) {
  MutexLock lock(mutex_);
  auto& device = devices_[index];
  if (device) return device;
  if (!driver_) driver_ = cuda::Driver::open().value();
  device = cuda::Device::open(driver_, index);
  return device;
}

ContextGuard::ContextGuard(CudaDevices& devices, const std::vector<c10::Stream>& streams) noexcept {
  struct Held {
    explicit Held(std::shared_ptr<cuda::Device> of) : device(std::move(of)), guard(*device) {}
    std::shared_ptr<cuda::Device> device;
    cuda::DeviceGuard guard;
  };
  if (streams.empty()) return;
  try {
    held_ = std::make_shared<Held>(devices.open(streams.front().device_index()));
  } catch (const std::exception& error) {
    log::warn(std::string("no CUDA context for a function: ") + error.what());
  }
}

c10::Stream CudaDevices::current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Fence CudaDevices::recorded(const c10::Stream& stream) {
  return cuda::record(view_of(*open(device_of(stream.device()).index), stream));
}

Fence CudaDevices::ready(const c10::Device& device) {
  return device.is_cpu() ? Fence() : recorded(current_stream(device));
}

Fence CudaDevices::recorded(const std::vector<c10::Stream>& streams) {
  if (streams.empty()) return {};
  if (streams.size() == 1) return recorded(streams.front());
  // Joins them on a stream of the pool, so that none of the given streams waits for the others.
  const c10::Device first = streams.front().device();
  const c10::Stream meeting =
      c10::impl::VirtualGuardImpl(first.type()).getStreamFromGlobalPool(first);
  for (const c10::Stream& stream : streams) wait(recorded(stream), meeting);
  return recorded(meeting);
}

void CudaDevices::refuse_capture(const c10::Device& device, std::string_view what,
                                 std::string_view why) {
  if (device.is_cpu() ||
      !view_of(*open(device_of(device).index), current_stream(device)).is_capturing())
    return;
  throw Error(Blame::Caller,
              std::string(what) +
                  " cannot be captured into a CUDA graph, but the current stream of " +
                  device.str() + " is being captured: " + std::string(why));
}

bool CudaDevices::is_captured(const Fence& fence) { return cuda::is_captured(fence); }

void CudaDevices::wait(const Fence& fence, const c10::Stream& stream) {
  const auto device = open(device_of(stream.device()).index);
  const cuda::StreamRef view = view_of(*device, stream);
  auto shown = trace::timeline::on() && !fence.query()
                   ? cuda::Span::begin(view, "wait", trace::Layer::Engine)
                   : cuda::Span();
  fence.wait(view);
  shown.end(view);
}

detail::DeviceWorkRef CudaDevices::work(const c10::Device& device, std::vector<Fence> fences) {
  return std::make_shared<StreamWork>(shared_from_this(), device, std::move(fences));
}

detail::DeviceWorkRef CudaDevices::work(const std::vector<c10::Stream>& streams,
                                        std::vector<c10::Storage> storages) {
  if (streams.empty()) return nullptr;
  return std::make_shared<EnqueuedWork>(shared_from_this(), streams, std::move(storages));
}

std::vector<c10::Stream> CudaDevices::pool_streams(const std::vector<int>& gpus) {
  std::vector<c10::Stream> streams;
  for (const int index : gpus) {
    streams.push_back(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(gpu(index)));
  }
  return streams;
}

std::vector<c10::Stream> CudaDevices::current_streams(const std::vector<int>& gpus) {
  std::vector<c10::Stream> streams;
  for (const int index : gpus) streams.push_back(current_stream(gpu(index)));
  return streams;
}

c10::Storage CudaDevices::allocate(std::size_t bytes, const c10::Stream& stream) {
  // libtorch initialises its CUDA allocator only when it makes its first tensor.
  if (at::globalContext().hasCUDA()) at::globalContext().lazyInitDevice(c10::kCUDA);
  const c10::StreamGuard current(stream);
  const cuda::RelaxedCapture relaxed(open(stream.device_index())->driver());
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::GetAllocator(c10::kCUDA)->allocate(bytes),
                      /*allocator=*/nullptr, /*resizable=*/false);
}

void CudaDevices::prepare_connections(const std::vector<int>& gpus) {
  if (!gpus.empty()) warn_of_early_cuda();
  std::vector<std::shared_ptr<cuda::Device>> devices;
  for (const int index : gpus) devices.push_back(open(index));
  stage_ = std::make_shared<transport::staged::Stage>(std::move(devices));
}

std::shared_ptr<transport::Connection> CudaDevices::connection_over(
    std::shared_ptr<transport::Connection> below, const std::shared_ptr<EventLoop>& loop) {
  const bool fits = transport::cuda_ipc::fits(*below);
  auto staged = transport::staged::over(std::move(below), stage_, loop);
  if (!fits) return staged;
  return transport::cuda_ipc::over(std::move(staged), stage_, loop,
                                   here_ ? *here_ : transport::cuda_ipc::Identity::here());
}

std::shared_ptr<transport::Communicator> CudaDevices::stage_over(
    std::shared_ptr<transport::Communicator> host, int index,
    const std::shared_ptr<EventLoop>& loop) {
  warn_of_early_cuda();
  return transport::staged::over(std::move(host), open(index), loop);
}

void CudaDevices::reclaim(Deadline deadline) {
  std::map<int, std::shared_ptr<cuda::Device>> devices;
  {
    MutexLock lock(mutex_);
    devices = devices_;
  }
  for (const auto& [index, device] : devices) {
    if (device) static_cast<void>(device->retirement().reclaim_all(deadline));
  }
}

}  // namespace weft::tensor
