// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <utility>

#include <weft/base/mutex.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/trace/trace.h>

namespace weft::cuda {

namespace {

constinit trace::Name pinning{trace::Layer::Cuda, "pin host memory"};

constexpr std::size_t kSmallestBlock = 256;

// Four sizes per doubling, so that at most a fifth of a block is unused: 256, 320, 384, 448, 512,
// 640 …
std::size_t size_class(std::size_t bytes) {
  if (bytes <= kSmallestBlock) return kSmallestBlock;
  const int shift = std::bit_width(bytes - 1) - 3;  // log2 of the step
  return ((bytes - 1) >> shift << shift) + (std::size_t{1} << shift);
}

}  // namespace

PinnedSlab::PinnedSlab(Device& device, std::size_t bytes) : device_(device), bytes_(bytes) {
  trace::Range range(pinning, {.bytes = bytes, .device = device.index()});
  DeviceGuard guard(device_);
  const Driver& driver = device_.driver();
  RelaxedCapture relaxed(driver);
  void* data = nullptr;
  device_.check(
      driver.mem_host_alloc(&data, bytes_, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
      "cuMemHostAlloc of " + std::to_string(bytes_) + " bytes");
  const CUresult mapped = driver.mem_host_get_device_pointer(&address_, data, 0);
  if (mapped != CUDA_SUCCESS) {
    driver.mem_free_host(data);
    device_.check(mapped, "cuMemHostGetDevicePointer");
  }
  data_ = static_cast<std::byte*>(data);
}

PinnedSlab::~PinnedSlab() {
  if (data_ == nullptr) return;
  // The device owns the retirement, so it exists when the task runs.
  device_.retirement().retire(Fence(), [&device = device_, data = data_] {
    if (device.is_lost()) return;  // memory of a lost device cannot be freed
    DeviceGuard guard(device);
    RelaxedCapture relaxed(device.driver());
    device.check(device.driver().mem_free_host(data), "cuMemFreeHost");
  });
}

PinnedSlab::PinnedSlab(PinnedSlab&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      address_(other.address_) {}

struct PinnedPool::State {
  struct Block {
    std::byte* data = nullptr;
    CUdeviceptr address = 0;
  };

  State(Device& of, std::size_t bytes) : device(of.shared_from_this()), slab_bytes(bytes) {}

  // Cuts a block from the current slab, or from a new one.
  Block cut(std::size_t room) WEFT_REQUIRES(mutex) {
    if (room > slab_bytes / 4) {
      const PinnedSlab& own = grow(room);
      return {own.data(), own.address()};
    }
    if (current_left < room) {
      const PinnedSlab& fresh = grow(slab_bytes);
      current = {fresh.data(), fresh.address()};
      current_left = slab_bytes;
    }
    const Block block = current;
    current = {current.data + room, current.address + room};
    current_left -= room;
    return block;
  }

  const PinnedSlab& grow(std::size_t bytes) WEFT_REQUIRES(mutex) {
    slabs.emplace_back(*device, bytes);
    usage.pinned_bytes += bytes;
    return slabs.back();
  }

  std::shared_ptr<Device> device;
  const std::size_t slab_bytes;
  Mutex mutex;
  std::vector<PinnedSlab> slabs WEFT_GUARDED_BY(mutex);
  Block current WEFT_GUARDED_BY(mutex);
  std::size_t current_left WEFT_GUARDED_BY(mutex) = 0;
  std::map<std::size_t, std::vector<Block>> idle WEFT_GUARDED_BY(mutex);  // by size class
  Usage usage WEFT_GUARDED_BY(mutex);
};

PinnedPool::PinnedPool(Device& device, std::size_t slab_bytes)
    : state_(std::make_shared<State>(device, slab_bytes)) {}

PinnedMemory PinnedPool::allocate(std::size_t bytes) {
  const std::size_t room = size_class(bytes);
  State::Block block;
  {
    MutexLock lock(state_->mutex);
    auto& idle = state_->idle[room];
    if (idle.empty()) {
      block = state_->cut(room);
    } else {
      block = idle.back();
      idle.pop_back();
    }
    state_->usage.used_bytes += room;
  }
  PinnedMemory memory;
  memory.pool_ = state_;
  memory.data_ = block.data;
  memory.address_ = block.address;
  memory.bytes_ = bytes;
  memory.room_ = room;
  return memory;
}

PinnedPool::Usage PinnedPool::usage() const {
  MutexLock lock(state_->mutex);
  return state_->usage;
}

PinnedMemory::~PinnedMemory() { give_back(); }

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : pool_(std::move(other.pool_)),
      data_(std::exchange(other.data_, nullptr)),
      address_(std::exchange(other.address_, 0)),
      bytes_(std::exchange(other.bytes_, 0)),
      room_(std::exchange(other.room_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  if (this != &other) {
    give_back();
    pool_ = std::move(other.pool_);
    data_ = std::exchange(other.data_, nullptr);
    address_ = std::exchange(other.address_, 0);
    bytes_ = std::exchange(other.bytes_, 0);
    room_ = std::exchange(other.room_, 0);
  }
  return *this;
}

void PinnedMemory::give_back() noexcept {
  if (!pool_) return;
  {
    MutexLock lock(pool_->mutex);
    pool_->idle[room_].push_back({data_, address_});
    pool_->usage.used_bytes -= room_;
  }
  pool_.reset();
}

}  // namespace weft::cuda
