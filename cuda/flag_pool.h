// Flags in mapped pinned memory, in both directions: the host raises one and streams wait for it,
// or a stream raises one and the host polls it (a load, where asking an event is a call of the
// driver).
//
// A word of the pool only ever counts up. Its n-th flag is raised when the word reaches n, and
// waits compare in cyclic order (Compare::GreaterOrEqual): a stream that comes to its wait long
// after the word has gone on to serve other flags still finds it satisfied. So the slot of a raised
// flag is used again at once, whatever still waits for it, and nothing is ever reset.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <weft/base/fence.h>
#include <weft/cuda/device.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

// The words, shared by the pool and the flags.
class FlagWords;

// The use of one word for one flag: raised when *word has reached value.
struct FlagSlot {
  std::atomic<std::uint32_t>* word = nullptr;
  CUdeviceptr address = 0;
  std::uint32_t value = 0;

  bool raised() const noexcept {
    return static_cast<std::int32_t>(word->load(std::memory_order_acquire) - value) >= 0;
  }
};

// A HostFlag that streams can wait for: the done() of an Op that host code finishes. Kernels must
// be loaded before a stream waits (Library::preload), see stream_memops.h. Made by a FlagPool.
// Usable from every thread.
class MappedFlag final : public HostFlag {
 public:
  MappedFlag(std::shared_ptr<FlagWords> words, FlagSlot slot);
  // Raises it if nobody did, because a stream may wait for it; if one does, that is logged as the
  // error it is.
  ~MappedFlag() override;

  // cuStreamWaitValue32; the stream may be of any device. Unsupported where that has no stream
  // memory operations.
  void wait(const StreamRef& stream) const override;

 private:
  std::shared_ptr<FlagWords> words_;
  FlagSlot slot_;
  mutable std::atomic<bool> awaited_{false};
};

// Usable from every thread. Flags and fences may outlive it.
class FlagPool {
 public:
  explicit FlagPool(Device& device);

  // A flag for the host to raise. Calls the driver only when all slots are taken.
  std::shared_ptr<MappedFlag> make();

  // Enqueues the raising of a flag on the stream: the fence passes when all that was enqueued
  // before has run, and with it what that wrote to host memory is visible. Like cuda::record, but
  // cheaper to poll and dearer for streams to wait for. Passes also when the context ends, see
  // Device::lost().
  Fence signal(const StreamRef& stream);

  struct Usage {
    std::size_t slots = 0;
    std::size_t free = 0;  // to be taken at once
  };
  Usage usage() const;

 private:
  std::shared_ptr<FlagWords> words_;
};

}  // namespace weft::cuda
