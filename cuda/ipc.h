// SPDX-License-Identifier: Apache-2.0
// Device memory and events that processes of one host share. (Reference: the CUDA driver API,
// "IPC".)
//
// The driver's rules: Memory of cuMemAlloc, which libtorch's allocator uses, is shared by a handle
// of 64 bytes. The handle stands for the whole allocation, and the process that made the memory
// cannot open it. Memory that is mapped to virtual addresses (cuMemMap; libtorch's expandable
// segments) is shared by a file descriptor, if it was created for that. Memory of stream-ordered
// pools is not shared. Opening is slow and closing waits for the device, so each allocation is
// opened and closed only once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/base/slice.h>
#include <weft/cuda/device.h>
#include <weft/cuda/event.h>
#include <weft/cuda/ipc_names.h>

namespace weft::cuda {

// Returns the GPU's name, which is the same in all processes, also under different
// CUDA_VISIBLE_DEVICES.
Uuid uuid_of(Device& device);
// True if `reader` can read the memory of the GPU `uuid`: if it is the same GPU, or a peer that
// this process sees.
bool can_read(Device& reader, const Uuid& uuid);

// Device memory that other processes may open. Allocating and freeing it may wait for the device.
class ShareableMemory {
 public:
  ShareableMemory(Device& device, std::size_t bytes);
  // Hands the memory to the device's retirement. Nothing may still be using it.
  ~ShareableMemory();
  ShareableMemory(const ShareableMemory&) = delete;
  ShareableMemory& operator=(const ShareableMemory&) = delete;

  Slice slice() const;

 private:
  std::shared_ptr<Device> device_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
};

// The allocation that contains an address of the device; for virtual addresses, the range that one
// call mapped.
struct AllocationRange {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;  // unique; unlike an address, it is never used again
};
// Throws Caller if nothing is allocated at the address.
AllocationRange allocation_of(Device& device, CUdeviceptr address);

// Returns nullopt if the driver does not share this kind of memory.
std::optional<IpcHandle> share_memory(Device& device, CUdeviceptr base);

// The physical memory behind a virtual address; the address may be mapped to other memory later.
// While this object lives, the memory stays allocated even if the program has freed it, so the
// driver gives its handle to no other memory.
class PhysicalMemory {
 public:
  // Returns nullopt if the address was not mapped with cuMemMap.
  static std::optional<PhysicalMemory> at(Device& device, CUdeviceptr address);
  // Releases the memory at once.
  ~PhysicalMemory();
  PhysicalMemory(PhysicalMemory&& other) noexcept;
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;

  bool operator==(const PhysicalMemory& other) const { return handle_ == other.handle_; }
  // Returns a descriptor for OpenedMemory in another process. It is invalid if the memory was not
  // created for sharing by descriptor (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR).
  Descriptor share() const;

 private:
  PhysicalMemory(Device& device, CUmemGenericAllocationHandle handle);

  std::shared_ptr<Device> device_;  // null once moved from
  CUmemGenericAllocationHandle handle_ = 0;
};

// Another process's allocation. Any thread may use it.
class OpenedMemory {
 public:
  // Opens the memory on a device that can reach the allocation's device. May wait for the device.
  // Throws Caller if the memory has been freed or belongs to this process. If the driver reports
  // CUDA_ERROR_ALREADY_MAPPED, memory that the other process has freed since is still open at the
  // same addresses: then this calls `close_others` and tries once more.
  OpenedMemory(Device& device, const IpcHandle& handle,
               const std::function<void()>& close_others = {});
  // Opens the first `bytes` of memory that was shared as a descriptor. The descriptor is not needed
  // afterwards. Throws Caller if it is not such a descriptor or its memory is smaller.
  OpenedMemory(Device& device, const Descriptor& descriptor, std::size_t bytes);
  // Hands the memory to the device's retirement. Nothing may still be using it.
  ~OpenedMemory();
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;

  CUdeviceptr base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  CUdeviceptr base_ = 0;
  std::size_t bytes_ = 0;
  bool is_mapped_ = false;  // mapped to addresses that this object has reserved
};

// An event of this process that streams of other processes wait for, or an event of another
// process. Do not record it again while another process has yet to make a stream wait for the last
// record: the stream would wait for the new one. The device must outlive it.
class SharedEvent : public EventRef {
 public:
  explicit SharedEvent(Device& device);
  SharedEvent(Device& device, const IpcHandle& theirs);
  ~SharedEvent();
  SharedEvent(SharedEvent&& other) noexcept;
  SharedEvent& operator=(SharedEvent&&) = delete;

  IpcHandle handle() const;
};

}  // namespace weft::cuda
