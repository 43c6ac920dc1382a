// SPDX-License-Identifier: Apache-2.0
// Host memory for received tensors. The memory of a freed tensor is kept for the next tensor of
// about the same size, because the first touch of memory that is fresh from the system costs more
// than the copy into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>

#include <c10/core/Allocator.h>

#include <weft/base/mutex.h>

namespace weft {

// Usable from every thread. Memory that it has given out keeps it alive.
class ReceivePool : public std::enable_shared_from_this<ReceivePool> {
 public:
  // Smaller blocks come from libtorch's allocator.
  static constexpr std::size_t kPooledBytes = 256 << 10;
  // Bytes of unused blocks that are kept. A larger block is never kept.
  static constexpr std::size_t kMostIdle = 256 << 20;

  // How much memory the pool may have, used and unused together.
  enum class Total {
    Any,
    AsMuchAsWasUsed,  // at one time, so that unused blocks do not raise the peak
  };

  // Keeps at most `most_idle` bytes of unused blocks, within `total`; drops the oldest first.
  explicit ReceivePool(std::size_t most_idle = kMostIdle, Total total = Total::Any)
      : most_idle_(most_idle), total_(total) {}
  ~ReceivePool();
  ReceivePool(const ReceivePool&) = delete;
  ReceivePool& operator=(const ReceivePool&) = delete;

  // At least that many bytes on the host, not cleared, aligned for vectors. Throws std::bad_alloc,
  // c10::Error.
  c10::DataPtr allocate(std::size_t bytes);
  std::size_t idle_bytes() const;

 private:
  struct Idle {
    void* data;
    std::uint64_t stamp;  // the order in which blocks came back
  };
  struct Block;

  void give_back(void* data, std::size_t bytes) noexcept;
  bool has_too_much() const WEFT_REQUIRES(mutex_);
  void drop_oldest() WEFT_REQUIRES(mutex_);

  const std::size_t most_idle_;
  const Total total_;
  mutable Mutex mutex_;
  // By size, the oldest in front.
  std::map<std::size_t, std::deque<Idle>> idle_ WEFT_GUARDED_BY(mutex_);
  std::size_t idle_bytes_ WEFT_GUARDED_BY(mutex_) = 0;
  std::size_t used_bytes_ WEFT_GUARDED_BY(mutex_) = 0;
  std::size_t most_used_ WEFT_GUARDED_BY(mutex_) = 0;  // bytes, at one time
  std::uint64_t stamps_ WEFT_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft
