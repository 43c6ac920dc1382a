// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/transport/shm/ring.h>

namespace weft::transport::shm {

namespace {

// A large piece is shown to the reader in parts of this size, so that the reader copies while the
// writer does.
constexpr std::size_t kShownAtOnce = 32 << 10;

}  // namespace

std::size_t RingWriter::room() noexcept {
  if (broken_) return 0;
  const std::uint64_t tail = control_->tail.load(std::memory_order_acquire);
  tail_.store(tail, std::memory_order_relaxed);
  if (head_ - tail <= capacity_) return capacity_ - (head_ - tail);
  broken_ = true;
  return 0;
}

std::size_t RingWriter::write(std::span<const std::span<const std::byte>> pieces) noexcept {
  std::size_t written = 0;
  std::size_t unseen = 0;
  const std::uint64_t filled = head_ - tail_.load(std::memory_order_relaxed);
  std::size_t free = filled <= capacity_ ? capacity_ - filled : 0;
  for (std::span<const std::byte> piece : pieces) {
    while (!piece.empty()) {
      if (free < piece.size()) free = room();
      const std::size_t count = std::min({piece.size(), free, kShownAtOnce});
      if (count == 0) break;
      std::memcpy(data_ + (head_ & (capacity_ - 1)), piece.data(), count);
      head_ += count;
      free -= count;
      written += count;
      unseen += count;
      piece = piece.subspan(count);
      if (unseen < kShownAtOnce) continue;
      control_->head.store(head_, std::memory_order_release);
      unseen = 0;
    }
    if (!piece.empty()) break;
  }
  if (unseen > 0) control_->head.store(head_, std::memory_order_release);
  return written;
}

std::span<const std::byte> RingReader::peek(std::size_t wanted) noexcept {
  const std::byte* const from = data_ + (tail_ & (capacity_ - 1));
  if (!broken_ && wanted > 0 && head_ - tail_ >= wanted)
    return {from, static_cast<std::size_t>(head_ - tail_)};
  head_ = control_->head.load(std::memory_order_acquire);
  if (broken_ || head_ - tail_ > capacity_) {
    broken_ = true;
    return {};
  }
  return {from, static_cast<std::size_t>(head_ - tail_)};
}

void RingReader::consume(std::size_t bytes) noexcept {
  tail_ += bytes;
  if (tail_ - shown_ < capacity_ / 4 && tail_ != head_) return;
  shown_ = tail_;
  control_->tail.store(tail_, std::memory_order_release);
}

}  // namespace weft::transport::shm
