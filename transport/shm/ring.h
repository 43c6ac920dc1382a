// SPDX-License-Identifier: Apache-2.0
// One direction of a connection: a ring of bytes in memory that two processes share. One process
// writes, the other reads. The ring is mapped twice in a row, so free bytes and filled bytes are
// always contiguous. Each process checks numbers from the other one before it uses them: a faulty
// peer can spoil only its own bytes.
//
// A ring begins small, since most pairs of a large group exchange little. When bytes do not fit,
// the writer goes on in a large ring, and names the position from which on the bytes are there. The
// reader moves the bytes in front of it, which it has not consumed yet, so that all are contiguous
// again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include <weft/base/make_error.h>

namespace weft::transport::shm {

// The memory of one direction. Both capacities are powers of two.
struct RingMemory {
  std::byte* small = nullptr;
  std::size_t small_bytes = 0;
  std::byte* large = nullptr;  // allocated when the writer begins to use it
  std::size_t large_bytes = 0;
};

// Lies in the segment. Each cache line is written by one side only, so that neither side takes the
// other's line without need.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> head;    // bytes ever written
  std::atomic<std::uint64_t> grown_at;            // 1 + the position of the first byte that lies in
                                                  // the large ring; 0 until the ring has grown
  alignas(64) std::atomic<std::uint64_t> tail;    // bytes ever read
  alignas(64) std::atomic<std::uint32_t> closed;  // the writer has finished
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// Allocates the pages of shared memory. Returns 0, or errno: EINVAL if the kernel cannot.
int populate(std::byte* memory, std::size_t bytes) noexcept;

class RingWriter {
 public:
  RingWriter(RingControl* control, const RingMemory& memory)
      : control_(control), memory_(memory), data_(memory.small), capacity_(memory.small_bytes) {}

  // Returns the free bytes; 0 if the ring is full or broken.
  std::size_t room() noexcept;
  // Copies as many bytes as there is room for and shows them to the reader, large pieces part by
  // part. Returns how many. Grows the ring if they do not fit.
  std::size_t write(std::span<const std::span<const std::byte>> pieces) noexcept;
  // True if room() would be larger than at its last call. May be called while another thread
  // writes.
  bool has_more_room() const noexcept {
    return control_->tail.load(std::memory_order_acquire) != tail_.load(std::memory_order_relaxed);
  }
  void close() noexcept { control_->closed.store(1, std::memory_order_release); }
  bool broken() const noexcept { return broken_; }
  // errno of the allocation by which the ring should have grown; 0 if that has not failed. Then
  // long messages may never arrive whole.
  int growth_error() const noexcept { return growth_error_; }

 private:
  bool grow() noexcept;

  RingControl* control_;
  RingMemory memory_;
  std::byte* data_;
  std::size_t capacity_;
  int growth_error_ = 0;
  std::uint64_t head_ = 0;
  std::atomic<std::uint64_t> tail_{0};  // as last seen
  bool broken_ = false;
};

class RingReader {
 public:
  RingReader(RingControl* control, const RingMemory& memory)
      : control_(control), memory_(memory), data_(memory.small), capacity_(memory.small_bytes) {}

  // Returns the bytes that have arrived and are not consumed. Reads the writer's position only if
  // fewer than `wanted` are known: the less each side looks at the other's cache lines, the faster
  // both are.
  std::span<const std::byte> peek(std::size_t wanted) noexcept;
  // Frees bytes. The writer sees the room when a quarter of the ring has been freed or nothing is
  // left to read.
  void consume(std::size_t bytes) noexcept;
  // Returns how many bytes the writer has ever written. Unchecked: use it for comparing only.
  std::uint64_t head() const noexcept { return control_->head.load(std::memory_order_acquire); }
  // Returns how many bytes the reader has not shown as read. Unchecked. Thread-safe.
  std::uint64_t unread() const noexcept {
    return head() - control_->tail.load(std::memory_order_relaxed);
  }
  bool closed() const noexcept { return control_->closed.load(std::memory_order_acquire) != 0; }
  bool broken() const noexcept { return broken_; }
  // True if the last consume() has shown its room to the writer.
  bool has_shown_room() const noexcept { return shown_ == tail_; }

 private:
  void follow_to_large() noexcept;

  RingControl* control_;
  RingMemory memory_;
  std::byte* data_;
  std::size_t capacity_;
  std::uint64_t head_ = 0;  // as last seen
  std::uint64_t tail_ = 0;
  std::uint64_t shown_ = 0;  // the tail that the writer sees
  bool broken_ = false;
};

}  // namespace weft::transport::shm
