// SPDX-License-Identifier: Apache-2.0
// GPU memory that a NIC reads and writes directly (GPUDirect RDMA). (Reference: the CUDA driver
// API, cuMemGetHandleForAddressRange and cuFlushGPUDirectRDMAWrites.)
#pragma once

#include <cstddef>

#include <weft/base/descriptor.h>
#include <weft/cuda/device.h>

namespace weft::cuda {

// A dma-buf for a NIC's driver to register: the host-sized pages that contain a piece of GPU
// memory. It keeps the memory from being reused, even after the program frees it. A registration
// does the same by itself, so this object is not needed after registering.
class DmaBuf {
 public:
  // Exports memory of one allocation. Throws Unsupported if the GPU or this kind of memory cannot
  // be exported.
  DmaBuf(Device& device, CUdeviceptr address, std::size_t bytes);

  int descriptor() const { return descriptor_.get(); }
  // The offset of `address` from the begin of the dma-buf.
  std::size_t offset() const { return offset_; }

 private:
  Descriptor descriptor_;
  std::size_t offset_ = 0;
};

// Makes what NICs have written to GPU memory visible to work that starts on the GPU afterwards.
// Does nothing if the GPU guarantees that itself (RemoteWrites::Ordered). Throws Device.
void flush_remote_writes(Device& device);

// Copies between GPU and host memory, or within either, and waits for the copy; meant for rare use.
// Throws Device; Timeout if the copy has not ended after a minute, in which case it may still
// happen.
void copy_and_wait(Device& device, void* to, const void* from, std::size_t bytes);

}  // namespace weft::cuda
