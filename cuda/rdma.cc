// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <weft/cuda/fence.h>
#include <weft/cuda/rdma.h>

namespace weft::cuda {

namespace {

// The limit for a copy, which waits for no other work.
constexpr auto kCopy = std::chrono::seconds(60);

}  // namespace

DmaBuf::DmaBuf(Device& device, CUdeviceptr address, std::size_t bytes) {
  if (!device.properties().dma_buf) {
    throw Error(Blame::Unsupported, describe(device.id()) + " cannot export memory as a dma-buf");
  }
  // The driver exports whole pages only. The first and the last page may also contain other memory,
  // whose bytes are never used.
  const auto page = static_cast<CUdeviceptr>(::sysconf(_SC_PAGESIZE));
  const CUdeviceptr begin = address / page * page;
  const CUdeviceptr end = (address + bytes + page - 1) / page * page;
  offset_ = static_cast<std::size_t>(address - begin);
  DeviceGuard guard(device);
  const RelaxedCapture relaxed(device.driver());
  int number = -1;
  const CUresult result = device.driver().mem_get_handle_for_address_range(
      &number, begin, static_cast<std::size_t>(end - begin), CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
      0);
  if (result == CUDA_SUCCESS) {
    descriptor_ = Descriptor(number);
    return;
  }
  if (is_sticky(result) || (result == CUDA_ERROR_UNKNOWN && !device.probe()))
    device.check(result, "cuMemGetHandleForAddressRange");
  throw Error(
      Blame::Unsupported,
      error_of(device.driver(), result, "cuMemGetHandleForAddressRange on " + describe(device.id()))
          .text(),
      result);
}

void flush_remote_writes(Device& device) {
  if (device.properties().remote_writes == Device::RemoteWrites::Ordered) return;
  DeviceGuard guard(device);
  const RelaxedCapture relaxed(device.driver());
  device.check(device.driver().flush_gpu_direct_rdma_writes(
                   CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                   CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
               "cuFlushGPUDirectRDMAWrites");
}

void copy_and_wait(Device& device, void* to, const void* from, std::size_t bytes) {
  DeviceGuard guard(device);
  const RelaxedCapture relaxed(device.driver());
  // So that it does not queue behind the program's work.
  const Stream stream(device, Priority::High);
  device.check(
      device.driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to),
                                   reinterpret_cast<CUdeviceptr>(from), bytes, stream.native()),
      "cuMemcpyAsync");
  const bool in_time = record(stream).synchronize(Deadline::in(kCopy));
  if (const auto lost = device.lost()) throw *lost;
  if (in_time) return;
  // An enqueued copy cannot be withdrawn.
  throw Error(Blame::Timeout,
              "a copy of " + std::to_string(bytes) + " bytes on " + describe(device.id()) +
                  " has not ended after " + describe(std::chrono::milliseconds(kCopy)) +
                  " and may still happen: the GPU hangs; do not use that memory again");
}

}  // namespace weft::cuda
