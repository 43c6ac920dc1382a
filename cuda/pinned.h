// SPDX-License-Identifier: Apache-2.0
// Pinned host memory: page-locked, mapped into every GPU's address space, portable between
// contexts. Asynchronous copies and stream memory operations need it. Allocating it takes
// milliseconds and freeing it waits for the whole device, so a pool keeps it in slabs and hands out
// blocks.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <weft/base/slice.h>
#include <weft/cuda/device.h>

namespace weft::cuda {

// Memory directly from the driver, for code that hands it out in parts. The device must outlive it.
class PinnedSlab {
 public:
  // May block: for milliseconds, and on some drivers until the device is idle. Throws Busy if the
  // host has no room.
  PinnedSlab(Device& device, std::size_t bytes);
  // Hands the memory to the device's retirement. Nothing may still be using it.
  ~PinnedSlab();
  PinnedSlab(PinnedSlab&& other) noexcept;
  PinnedSlab& operator=(PinnedSlab&&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // The address at which devices see the memory.
  CUdeviceptr address() const { return address_; }
  // Leaves the freeing (cuMemFreeHost) to the caller, which must first wait for more than this
  // device.
  std::byte* release() noexcept { return std::exchange(data_, nullptr); }

 private:
  Device& device_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  CUdeviceptr address_ = 0;
};

class PinnedMemory;

// Any thread may use it. Blocks may outlive the pool; the slabs are retired when the pool and all
// blocks are gone.
class PinnedPool {
 public:
  static constexpr std::size_t kSlabBytes = std::size_t{8} << 20;

  explicit PinnedPool(Device& device, std::size_t slab_bytes = kSlabBytes);

  // Returns a block of at least `bytes` bytes, aligned to 64. Blocks only if the pool must grow,
  // see PinnedSlab. The contents are unspecified.
  PinnedMemory allocate(std::size_t bytes);

  struct Usage {
    std::size_t pinned_bytes = 0;  // of all slabs
    std::size_t used_bytes = 0;    // of all blocks in use, rounded up to their size classes
  };
  Usage usage() const;

 private:
  friend class PinnedMemory;
  struct State;
  std::shared_ptr<State> state_;
};

// One block. Its destructor returns it to the pool at once, so a copy that is under way must keep
// it, for example as the Pin of its Op: std::make_shared<PinnedMemory>(std::move(block)).
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;

  Slice slice() const { return {data_, bytes_, weft::Device::host()}; }
  CUdeviceptr address() const { return address_; }

 private:
  friend class PinnedPool;
  void give_back() noexcept;

  std::shared_ptr<PinnedPool::State> pool_;
  std::byte* data_ = nullptr;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;  // asked for
  std::size_t room_ = 0;   // its size class
};

}  // namespace weft::cuda
