// SPDX-License-Identifier: Apache-2.0
// Device memory, and copies and fills in stream order. (Pinned host memory is in pinned.h.)
#pragma once

#include <cstddef>
#include <memory>

#include <weft/base/slice.h>
#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// A pool of device memory. Unlike the driver's default pool, which returns freed memory at every
// synchronisation, it keeps freed memory for the next allocation. It also never makes a stream wait
// for another stream to reuse freed memory, because that would hang behind a stream that waits for
// a flag. Any thread may use it; the device must outlive it.
class MemoryPool {
 public:
  explicit MemoryPool(Device& device);
  // Memory that is still allocated stays valid; the driver frees the pool with the last allocation.
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  Device& device() const { return device_; }
  CUmemoryPool native() const { return native_; }

 private:
  Device& device_;
  CUmemoryPool native_ = nullptr;
};

// Device memory that is allocated and freed in stream order: valid for work enqueued on that stream
// after the constructor, and for other streams behind a fence recorded there. Does not block. It
// may move between threads, but only one thread may use it at a time.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Allocates from the driver's default pool, or from the given one (of the same device). Throws
  // Busy if the device has no room.
  DeviceMemory(const StreamRef& stream, std::size_t bytes);
  DeviceMemory(const StreamRef& stream, std::size_t bytes, const MemoryPool& pool);
  // Enqueues the freeing on the stream, after everything there. Wait for work on other streams
  // first.
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  // Makes the destructor free on another stream of the same device: because the memory is used last
  // there, or because the first stream ends.
  void set_stream(const StreamRef& stream);

  Slice slice() const;
  explicit operator bool() const { return address_ != 0; }

 private:
  DeviceMemory(const StreamRef& stream, std::size_t bytes, CUmemoryPool pool);
  void free() noexcept;

  std::shared_ptr<Device> device_;
  CUstream stream_ = nullptr;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
};

// Enqueues a copy between host and devices in any combination. Throws Caller if the sizes differ,
// or if host memory is not pinned, because the driver would make the host wait for pageable memory.
// Both slices must live until the stream has executed the copy.
void copy(const StreamRef& stream, Slice to, Slice from);

// Enqueues a fill of device or pinned memory with one byte.
void fill(const StreamRef& stream, Slice slice, unsigned char byte);

}  // namespace weft::cuda
