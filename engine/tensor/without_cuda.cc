// cuda_devices.h in a build without CUDA.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/base/error.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::tensor {

std::shared_ptr<cuda::Device> CudaDevices::open(int) {
  throw Error(Blame::Unsupported, "this Weft is built without CUDA (WEFT_CUDA=OFF): it carries tensors on the CPU only");
}

c10::Stream CudaDevices::current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Fence CudaDevices::recorded(const c10::Stream& stream) {
  open(stream.device_index());
  return {};
}

Fence CudaDevices::ready(const c10::Device& device) {
  if (!device.is_cpu()) open(device.index());
  return {};
}

void CudaDevices::wait(const Fence&, const c10::Stream& stream) { open(stream.device_index()); }

detail::DeviceWorkRef CudaDevices::work(const c10::Device& device, std::vector<Fence>) {
  open(device.index());
  return {};
}

std::shared_ptr<transport::Communicator> CudaDevices::stage_over(std::shared_ptr<transport::Communicator>, int index,
                                                                 const std::shared_ptr<EventLoop>&) {
  open(index);
  return {};
}

void CudaDevices::reclaim(Deadline) {}

}  // namespace weft::tensor
