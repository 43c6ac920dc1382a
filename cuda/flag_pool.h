// SPDX-License-Identifier: Apache-2.0
// Flags in mapped pinned memory, in both directions: the host raises one and streams wait for it,
// or a stream raises one and the host polls it. Polling is a load, where querying an event is a
// call of the driver.
//
// A word of the pool only counts up. Its n-th flag is raised when the word reaches n, and waits
// compare in cyclic order (Compare::GreaterOrEqual). So a stream that reaches its wait long after
// the word has begun to serve other flags still finds it satisfied, the slot of a raised flag is
// reused at once even while streams wait for it, and nothing is ever reset.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <weft/base/fence.h>
#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// The words; the pool and the flags share them.
class FlagWords;

// One word's use for one flag, which is raised when *word has reached value.
struct FlagSlot {
  std::atomic<std::uint32_t>* word = nullptr;
  CUdeviceptr address = 0;
  std::uint32_t value = 0;

  bool raised() const noexcept {
    return static_cast<std::int32_t>(word->load(std::memory_order_acquire) - value) >= 0;
  }
};

// A HostFlag that streams can wait for: the done() of an Op that host code finishes. Load all
// kernels before a stream waits (Library::preload), see stream_memops.h. A FlagPool makes it; any
// thread may use it.
class MappedFlag final : public HostFlag {
 public:
  MappedFlag(std::shared_ptr<FlagWords> words, FlagSlot slot);
  // Raises the flag if it is not raised, because a stream may wait for it; logs an error if one
  // does.
  ~MappedFlag() override;

  // Calls cuStreamWaitValue32; the stream may be of any device. Throws Unsupported if that device
  // has no stream memory operations.
  void wait(const StreamRef& stream) const override;

 private:
  std::shared_ptr<FlagWords> words_;
  FlagSlot slot_;
  mutable std::atomic<bool> awaited_{false};
};

// Any thread may use it. Flags and fences may outlive it.
class FlagPool {
 public:
  explicit FlagPool(Device& device);

  // Returns a flag for the host to raise. Calls the driver only if all slots are taken.
  std::shared_ptr<MappedFlag> make();

  // Enqueues the raising of a flag on the stream: the returned fence passes when all work enqueued
  // before has run, and then that work's writes to host memory are visible. Compared with
  // cuda::record, it is cheaper to poll and costlier for streams to wait for. It also passes when
  // the context ends, see Device::lost().
  Fence signal(const StreamRef& stream);

  struct Usage {
    std::size_t slots = 0;
    std::size_t free = 0;  // available without a call of the driver
  };
  Usage usage() const;

 private:
  std::shared_ptr<FlagWords> words_;
};

}  // namespace weft::cuda
