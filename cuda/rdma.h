// Memory of a GPU that a network card reads and writes itself (GPUDirect RDMA). (reference: the
// CUDA driver API, cuMemGetHandleForAddressRange and cuFlushGPUDirectRDMAWrites.)
#pragma once

#include <cstddef>

#include <weft/base/descriptor.h>
#include <weft/cuda/device.h>

namespace weft::cuda {

// What a card's driver registers: the pages of the host's size that some memory of a GPU lies in.
// It keeps the memory from being given to others, also when it is freed meanwhile; a registration
// does so on its own, and needs this no longer.
class DmaBuf {
 public:
  // Of one allocation. Throws Unsupported where the GPU or this kind of memory cannot be exported.
  DmaBuf(Device& device, CUdeviceptr address, std::size_t bytes);

  int descriptor() const { return descriptor_.get(); }
  // How far behind its begin `address` lies.
  std::size_t offset() const { return offset_; }

 private:
  Descriptor descriptor_;
  std::size_t offset_ = 0;
};

// What cards have written into the GPU's memory is seen by what runs there afterwards. Costs
// nothing where that is so anyway (RemoteWrites::Ordered). Throws Device.
void flush_remote_writes(Device& device);

// Copies between memory of the GPU and of the host, or within either, and waits until that is done:
// for what happens seldom. Throws Device; Timeout where it has not ended after a minute, which may
// still happen then.
void copy_and_wait(Device& device, void* to, const void* from, std::size_t bytes);

}  // namespace weft::cuda
