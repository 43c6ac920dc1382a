// One direction of a lane: a ring of bytes in memory that two processes share. One writes, one
// reads. The bytes are mapped twice in a row, so whatever is free or filled is contiguous. The
// capacity is a power of two. What the other process writes is checked before it is used: a peer
// that has gone mad can spoil its own bytes, nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace weft::transport::shm {

// Lies in the segment; each line is written by one side only, so that neither takes the other's
// cache line for nothing.
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

  // Room at the moment. 0 when the ring is full or broken.
  std::size_t room() noexcept;
  // Copies as much as there is room for and shows it to the reader, large pieces bit by bit;
  // returns how much.
  std::size_t write(std::span<const std::span<const std::byte>> pieces) noexcept;
  // Whether room() would be larger than when it was last asked. Also beside a thread that writes.
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

  // What has come and has not been consumed. Asks the writer only where less than `wanted` is known
  // of: the less the two look at each other's lines, the faster both are.
  std::span<const std::byte> peek(std::size_t wanted) noexcept;
  // Frees the room. The writer sees it when a quarter of the ring has gathered or nothing is left.
  void consume(std::size_t bytes) noexcept;
  // How many bytes the writer has ever written. Not checked: for comparing only.
  std::uint64_t head() const noexcept { return control_->head.load(std::memory_order_acquire); }
  bool closed() const noexcept { return control_->closed.load(std::memory_order_acquire) != 0; }
  bool broken() const noexcept { return broken_; }
  // Whether the last consume() has shown room to the writer.
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
