// Device memory and events that other processes of this host open. (reference: the CUDA driver API,
// "IPC".)
//
// The driver's rules. Memory of cuMemAlloc, as libtorch's allocator takes it, is shared by a handle
// of bytes, which stands for the whole allocation and which the process that made it cannot open.
// What is mapped to virtual addresses (cuMemMap; libtorch's expandable segments) is shared by a
// file descriptor, where it was made for that. Memory of stream-ordered pools is not shared.
// Opening takes long and closing waits for the device, so both are done once for an allocation.
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

// Names the GPU alike in all processes, whatever each may see.
Uuid uuid_of(Device& device);
// Whether what runs on this one can read the memory of that one: the same, or a peer that this
// process sees.
bool can_read(Device& reader, const Uuid& uuid);

// Device memory that other processes may open. Allocating and freeing may wait for the device.
class ShareableMemory {
 public:
  ShareableMemory(Device& device, std::size_t bytes);
  // Handed to the device's retirement. Nothing may still be using it.
  ~ShareableMemory();
  ShareableMemory(const ShareableMemory&) = delete;
  ShareableMemory& operator=(const ShareableMemory&) = delete;

  Slice slice() const;

 private:
  std::shared_ptr<Device> device_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
};

// The allocation that an address of the device lies in; of virtual addresses, what was mapped there
// by one call.
struct AllocationRange {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;  // not given to another one, as an address is
};
// Throws Caller where nothing is allocated there.
AllocationRange allocation_of(Device& device, CUdeviceptr address);

// Nothing where the driver does not share this kind of memory.
std::optional<IpcHandle> share_memory(Device& device, CUdeviceptr base);

// What a virtual address stands for: the address may stand for other memory later. While this lives
// the memory stays taken, also when the program has freed it, so that the driver gives its handle
// to no other.
class PhysicalMemory {
 public:
  // Nothing where the address is none of cuMemMap's.
  static std::optional<PhysicalMemory> at(Device& device, CUdeviceptr address);
  // Given back at once.
  ~PhysicalMemory();
  PhysicalMemory(PhysicalMemory&& other) noexcept;
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;

  bool operator==(const PhysicalMemory& other) const { return handle_ == other.handle_; }
  // For OpenedMemory in another process. An invalid one where the memory was not made to be shared
  // so (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR).
  Descriptor share() const;

 private:
  PhysicalMemory(Device& device, CUmemGenericAllocationHandle handle);

  std::shared_ptr<Device> device_;  // null: moved from
  CUmemGenericAllocationHandle handle_ = 0;
};

// Another process's allocation. Usable from every thread.
class OpenedMemory {
 public:
  // On a device that reaches the allocation's. May wait for the device. Throws Caller (freed, or of
  // this very process). `close_others` runs where the driver refuses, once, as memory that the
  // other process has freed since is open at those addresses (CUDA_ERROR_ALREADY_MAPPED).
  OpenedMemory(Device& device, const IpcHandle& handle,
               const std::function<void()>& close_others = {});
  // The first `bytes` of what was shared as a descriptor, which is not needed afterwards. Throws
  // Caller (it is none, or of less memory).
  OpenedMemory(Device& device, const Descriptor& descriptor, std::size_t bytes);
  // Handed to the device's retirement. Nothing may still be using it.
  ~OpenedMemory();
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;

  CUdeviceptr base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  CUdeviceptr base_ = 0;
  std::size_t bytes_ = 0;
  bool is_mapped_ = false;  // to addresses of its own
};

// An event that streams of other processes wait for, or theirs. Recorded anew while a stream of
// theirs has yet to be told to wait, it says something else: whoever records it knows that nobody
// is. The device must outlive it.
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
