// Device memory and what is done with it in the order of a stream. (Pinned host memory is in
// pinned.h.)
#pragma once

#include <cstddef>
#include <memory>

#include <weft/base/slice.h>
#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// Where device memory comes from. One of our own keeps what was freed for the next allocation (the
// driver's default pool returns it at every synchronisation) and never makes a stream wait for
// another one to get at freed memory: behind a stream that waits for a flag that would hang. Usable
// from every thread; the device must outlive it.
class MemoryPool {
 public:
  explicit MemoryPool(Device& device);
  // Memory that is still allocated stays valid; the driver frees the pool with the last of it.
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  Device& device() const { return device_; }
  CUmemoryPool native() const { return native_; }

 private:
  Device& device_;
  CUmemoryPool native_ = nullptr;
};

// Device memory that is allocated and freed in the order of a stream: valid for what is enqueued on
// that stream after the constructor, and for other streams behind a fence recorded there. Does not
// block. Moves from one thread to another, used by one at a time.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // From the driver's default pool, or from the given one (of the same device). Throws Busy when
  // there is no room.
  DeviceMemory(const StreamRef& stream, std::size_t bytes);
  DeviceMemory(const StreamRef& stream, std::size_t bytes, const MemoryPool& pool);
  // Enqueues the freeing on the stream, behind everything there. Work on other streams must have
  // been waited for.
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  // Frees on that stream instead, of the same device: where the memory is used last, or because the
  // first stream ends.
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

// Enqueues a copy between any two of host and devices. Both have the same number of bytes (Caller
// otherwise), and host memory is pinned: with pageable memory the driver would make the host wait,
// so that is a Caller error as well. Both must live until the stream has passed the copy.
void copy(const StreamRef& stream, Slice to, Slice from);

// Enqueues the filling of device or pinned memory with one byte.
void fill(const StreamRef& stream, Slice slice, unsigned char byte);

}  // namespace weft::cuda
