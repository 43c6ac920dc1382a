// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include <weft/base/log.h>
#include <weft/cuda/memory.h>

namespace weft::cuda {

namespace {

CUdeviceptr address_of(const Slice& slice) { return reinterpret_cast<CUdeviceptr>(slice.data); }

// For messages: "cpu 0x7f… (64 bytes)".
std::string text_of(const Slice& slice) {
  char text[64];
  std::snprintf(text, sizeof text, " %p (%zu bytes)", slice.data, slice.bytes);
  return describe(slice.device) + text;
}

// Requires a DeviceGuard. The driver knows pinned memory but no other host memory.
void require_pinned(const StreamRef& stream, const Slice& slice, const char* what) {
  if (!slice.device.is_host()) return;
  unsigned type = 0;
  const CUresult known = stream.driver().pointer_get_attribute(
      &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(slice));
  if (known == CUDA_ERROR_INVALID_VALUE) {
    throw Error(
        Blame::Caller,
        std::string(what) + " of " + text_of(slice) + " on a stream of " +
            describe(stream.device().id()) +
            ": that is pageable host memory, which would make the host wait; take it from a "
            "cuda::PinnedPool");
  }
  stream.device().check(known, "cuPointerGetAttribute");
}

CUmemoryPool native_for(const StreamRef& stream, const MemoryPool& pool) {
  if (&pool.device() != &stream.device()) {
    throw Error(Blame::Caller, "memory from a pool of " + describe(pool.device().id()) +
                                   " was requested on a stream of " +
                                   describe(stream.device().id()));
  }
  return pool.native();
}

}  // namespace

MemoryPool::MemoryPool(Device& device) : device_(device) {
  if (!device.properties().memory_pools) {
    throw Error(Blame::Unsupported,
                describe(device.id()) + " (" + device.properties().name + ") has no memory pools");
  }
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.index()};
  const Driver& driver = device.driver();
  DeviceGuard guard(device);
  device.check(driver.mem_pool_create(&native_, &properties), "cuMemPoolCreate");
  cuuint64_t keep_all = UINT64_MAX;
  int off = 0;
  CUresult set =
      driver.mem_pool_set_attribute(native_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all);
  if (set == CUDA_SUCCESS) {
    set = driver.mem_pool_set_attribute(native_, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
                                        &off);
  }
  if (set != CUDA_SUCCESS) {
    driver.mem_pool_destroy(native_);
    device.check(set, "cuMemPoolSetAttribute");
  }
}

MemoryPool::~MemoryPool() {
  try {
    DeviceGuard guard(device_);
    device_.check(device_.driver().mem_pool_destroy(native_), "cuMemPoolDestroy");
  } catch (const Error& error) {
    if (!device_.is_lost()) log::error(error.text());
  }
}

DeviceMemory::DeviceMemory(const StreamRef& stream, std::size_t bytes)
    : DeviceMemory(stream, bytes, nullptr) {}

DeviceMemory::DeviceMemory(const StreamRef& stream, std::size_t bytes, const MemoryPool& pool)
    : DeviceMemory(stream, bytes, native_for(stream, pool)) {}

DeviceMemory::DeviceMemory(const StreamRef& stream, std::size_t bytes, CUmemoryPool pool)
    : device_(stream.device().shared_from_this()), stream_(stream.native()), bytes_(bytes) {
  if (bytes == 0) return;
  const Driver& driver = device_->driver();
  DeviceGuard guard(*device_);
  const CUresult result = pool == nullptr
                              ? driver.mem_alloc_async(&address_, bytes, stream_)
                              : driver.mem_alloc_from_pool_async(&address_, bytes, pool, stream_);
  if (result != CUDA_SUCCESS)
    device_->check(result, "allocating " + std::to_string(bytes) + " bytes");
}

DeviceMemory::~DeviceMemory() { free(); }

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(std::move(other.device_)),
      stream_(other.stream_),
      address_(std::exchange(other.address_, 0)),
      bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  if (this != &other) {
    free();
    device_ = std::move(other.device_);
    stream_ = other.stream_;
    address_ = std::exchange(other.address_, 0);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void DeviceMemory::set_stream(const StreamRef& stream) {
  if (&stream.device() != device_.get()) {
    throw Error(Blame::Caller, "memory of " + describe(slice().device) +
                                   " cannot be freed on a stream of " +
                                   describe(stream.device().id()));
  }
  stream_ = stream.native();
}

Slice DeviceMemory::slice() const {
  return {reinterpret_cast<void*>(address_), bytes_,
          device_ ? device_->id() : weft::Device::host()};
}

void DeviceMemory::free() noexcept {
  if (address_ == 0) return;
  try {
    DeviceGuard guard(*device_);
    device_->check(device_->driver().mem_free_async(address_, stream_), "cuMemFreeAsync");
  } catch (const Error& error) {
    if (!device_->is_lost()) log::error(error.text());
  }
  address_ = 0;
}

void copy(const StreamRef& stream, Slice to, Slice from) {
  if (to.bytes != from.bytes) {
    throw Error(Blame::Caller,
                "copy to " + text_of(to) + " from " + text_of(from) + ": the sizes differ");
  }
  if (to.bytes == 0) return;
  DeviceGuard guard(stream.device());
  require_pinned(stream, to, "copy");
  require_pinned(stream, from, "copy");
  stream.device().check(
      stream.driver().memcpy_async(address_of(to), address_of(from), to.bytes, stream.native()),
      "cuMemcpyAsync");
}

void fill(const StreamRef& stream, Slice slice, unsigned char byte) {
  if (slice.bytes == 0) return;
  DeviceGuard guard(stream.device());
  require_pinned(stream, slice, "fill");
  stream.device().check(
      stream.driver().memset_d8_async(address_of(slice), byte, slice.bytes, stream.native()),
      "cuMemsetD8Async");
}

}  // namespace weft::cuda
