// SPDX-License-Identifier: Apache-2.0
// Implements cuda_devices.h in a build without CUDA.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/base/error.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/torch_cuda.h>

namespace weft::tensor {

bool CudaDevices::built() { return false; }

int CudaDevices::count() { return 0; }

std::shared_ptr<cuda::Device> CudaDevices::open(int) {
  throw Error(
      Blame::Unsupported,
      "this Weft is built without CUDA (WEFT_CUDA=OFF): it carries tensors on the CPU only");
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

void CudaDevices::refuse_capture(const c10::Device& device, std::string_view, std::string_view) {
  if (!device.is_cpu()) open(device.index());
}

bool CudaDevices::is_captured(const Fence&) { return false; }

void CudaDevices::wait(const Fence&, const c10::Stream& stream) { open(stream.device_index()); }

detail::DeviceWorkRef CudaDevices::work(const c10::Device& device, std::vector<Fence>) {
  open(device.index());
  return {};
}

Fence CudaDevices::recorded(const std::vector<c10::Stream>& streams) {
  if (!streams.empty()) open(streams.front().device_index());
  return {};
}

detail::DeviceWorkRef CudaDevices::work(const std::vector<c10::Stream>& streams,
                                        std::vector<c10::Storage>) {
  if (!streams.empty()) open(streams.front().device_index());
  return {};
}

std::vector<c10::Stream> CudaDevices::pool_streams(const std::vector<int>& gpus) {
  return current_streams(gpus);
}

std::vector<c10::Stream> CudaDevices::current_streams(const std::vector<int>& gpus) {
  std::vector<c10::Stream> streams;
  for (const int index : gpus) {
    streams.push_back(
        current_stream(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))));
  }
  return streams;
}

c10::Storage CudaDevices::allocate(std::size_t, const c10::Stream& stream) {
  CudaDevices().open(stream.device_index());
  return {};
}

void CudaDevices::prepare_connections(const std::vector<int>& gpus) {
  if (!gpus.empty()) open(gpus.front());
}

std::shared_ptr<transport::Connection> CudaDevices::connection_over(
    std::shared_ptr<transport::Connection>, const std::shared_ptr<EventLoop>&) {
  open(0);
  return {};
}

std::shared_ptr<transport::Communicator> CudaDevices::stage_over(
    std::shared_ptr<transport::Communicator>, int index, const std::shared_ptr<EventLoop>&) {
  open(index);
  return {};
}

void CudaDevices::reclaim(Deadline) {}

ContextGuard::ContextGuard(CudaDevices&, const std::vector<c10::Stream>&) noexcept {}

}  // namespace weft::tensor
