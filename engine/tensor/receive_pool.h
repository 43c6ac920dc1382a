// Host memory for tensors that are received. What a freed tensor leaves is kept for the next one of
// about its size: memory fresh from the system costs more to touch for the first time than the copy
// into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include <c10/core/Allocator.h>

namespace weft {

// Usable from every thread. What it has given out keeps it alive.
class ReceivePool : public std::enable_shared_from_this<ReceivePool> {
 public:
  static constexpr std::size_t kPooledBytes = 256
                                              << 10;  // smaller blocks are libtorch's allocator's
  static constexpr std::size_t kMostIdle = 256 << 20;

  // Of blocks that nobody uses, `most_idle` bytes are kept; the oldest go first.
  explicit ReceivePool(std::size_t most_idle = kMostIdle) : most_idle_(most_idle) {}
  ~ReceivePool();
  ReceivePool(const ReceivePool&) = delete;
  ReceivePool& operator=(const ReceivePool&) = delete;

  // At least that many bytes, on the host, not cleared, aligned for vectors. Throws std::bad_alloc,
  // c10::Error.
  c10::DataPtr allocate(std::size_t bytes);
  std::size_t idle_bytes() const;

 private:
  struct Idle {
    void* data;
    std::uint64_t stamp;  // the order in which they came back
  };
  struct Block;

  void give_back(void* data, std::size_t bytes) noexcept;
  void drop_oldest();

  const std::size_t most_idle_;
  mutable std::mutex mutex_;                      // of what follows
  std::map<std::size_t, std::deque<Idle>> idle_;  // by size, the oldest in front
  std::size_t idle_bytes_ = 0;
  std::uint64_t stamps_ = 0;
};

}  // namespace weft
