#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/cuda/device.h>
#include <weft/cuda/driver.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/stream.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/transport/staged.h>

namespace weft::tensor {

namespace {

class StreamWork : public detail::DeviceWork {
 public:
  StreamWork(std::shared_ptr<CudaDevices> devices, c10::Device device, std::vector<Fence> fences)
      : devices_(std::move(devices)), device_(device), fences_(std::move(fences)) {}

  void wait() const override { wait_on(CudaDevices::current_stream(device_)); }

  detail::DeviceWorkRef run(const std::function<void()>& function) const override {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::Stream stream = guard.getStreamFromGlobalPool(device_);
    wait_on(stream);
    {
      const c10::StreamGuard current(stream);
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

cuda::StreamRef view_of(cuda::Device& device, const c10::Stream& stream) {
  return {device, static_cast<CUstream>(stream.native_handle())};
}

}  // namespace

std::shared_ptr<cuda::Device> CudaDevices::open(int index) {
  std::lock_guard lock(mutex_);
  auto& device = devices_[index];
  if (device) return device;
  if (!driver_) driver_ = cuda::Driver::open().value();
  device = cuda::Device::open(driver_, index);
  return device;
}

c10::Stream CudaDevices::current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Fence CudaDevices::recorded(const c10::Stream& stream) {
  return cuda::record(view_of(*open(device_of(stream.device()).index), stream));
}

Fence CudaDevices::ready(const c10::Device& device) { return device.is_cpu() ? Fence() : recorded(current_stream(device)); }

void CudaDevices::wait(const Fence& fence, const c10::Stream& stream) {
  fence.wait(view_of(*open(device_of(stream.device()).index), stream));
}

detail::DeviceWorkRef CudaDevices::work(const c10::Device& device, std::vector<Fence> fences) {
  return std::make_shared<StreamWork>(shared_from_this(), device, std::move(fences));
}

std::shared_ptr<transport::Communicator> CudaDevices::stage_over(std::shared_ptr<transport::Communicator> host, int index,
                                                                 const std::shared_ptr<EventLoop>& loop) {
  return transport::staged::over(std::move(host), open(index), loop);
}

void CudaDevices::reclaim(Deadline deadline) {
  std::map<int, std::shared_ptr<cuda::Device>> devices;
  {
    std::lock_guard lock(mutex_);
    devices = devices_;
  }
  for (const auto& [index, device] : devices) {
    if (device) static_cast<void>(device->retirement().reclaim_all(deadline));
  }
}

}  // namespace weft::tensor
