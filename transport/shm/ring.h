// SPDX-License-Identifier: Apache-2.0
// One direction of a connection: a ring of bytes in memory that two processes share. One process
// writes, the other reads. The ring is mapped twice in a row, so free bytes and filled bytes are
// always contiguous. The capacity (kRingBytes in segment.h) is a power of two. Each process checks
// numbers from the other one before it uses them: a faulty peer can spoil only its own bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include <weft/base/make_error.h>

namespace weft::transport::shm {

// Lies in the segment. Each cache line is written by one side only, so that neither side takes the
// other's line without need.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> head;    // bytes ever written
  alignas(64) std::atomic<std::uint64_t> tail;    // bytes ever read
  alignas(64) std::atomic<std::uint32_t> closed;  // the writer has finished
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

class RingWriter {
 public:
  RingWriter(RingControl* control, std::byte* data, std::size_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  // Returns the free bytes; 0 if the ring is full or broken.
  std::size_t room() noexcept;
  // Copies as many bytes as there is room for and shows them to the reader, large pieces part by
  // part. Returns how many.
  std::size_t write(std::span<const std::span<const std::byte>> pieces) noexcept;
  // True if room() would be larger than at its last call. May be called while another thread
  // writes.
  bool has_more_room() const noexcept {
    return control_->tail.load(std::memory_order_acquire) != tail_.load(std::memory_order_relaxed);
  }
  void close() noexcept { control_->closed.store(1, std::memory_order_release); }
  bool broken() const noexcept { return broken_; }

 private:
  RingControl* control_;
  std::byte* data_;
  std::size_t capacity_;
  std::uint64_t head_ = 0;
  std::atomic<std::uint64_t> tail_{0};  // as last seen
  bool broken_ = false;
};

class RingReader {
 public:
  RingReader(RingControl* control, std::byte* data, std::size_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

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
  RingControl* control_;
  std::byte* data_;
  std::size_t capacity_;
  std::uint64_t head_ = 0;  // as last seen
  std::uint64_t tail_ = 0;
  std::uint64_t shown_ = 0;  // the tail that the writer sees
  bool broken_ = false;
};

}  // namespace weft::transport::shm
