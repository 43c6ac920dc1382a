// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#include <weft/transport/shm/ring.h>

namespace weft::transport::shm {

namespace {

// A large piece is shown to the reader in parts of this size, so that the reader copies while the
// writer does.
constexpr std::size_t kShownAtOnce = 32 << 10;

}  // namespace

int populate(std::byte* memory, std::size_t bytes) noexcept {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, since Linux 5.14
  while (::madvise(memory, bytes, kPopulateWrite) != 0) {
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

// The pages are allocated here, because a shortage at the first access would be a SIGBUS.
bool RingWriter::grow() noexcept {
  if (data_ == memory_.large || growth_error_ != 0) return false;
  const int error = populate(memory_.large, memory_.large_bytes);
  // A kernel that cannot allocate them here has done so when the segment was made.
  growth_error_ = error == EINVAL ? 0 : error;
  if (growth_error_ != 0) return false;
  data_ = memory_.large;
  capacity_ = memory_.large_bytes;
  control_->grown_at.store(head_ + 1, std::memory_order_release);
  return true;
}

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
      if (free < piece.size() && grow()) free = room();
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
  if (broken_ || wanted == 0 || head_ - tail_ < wanted) {
    head_ = control_->head.load(std::memory_order_acquire);
    if (data_ != memory_.large) follow_to_large();
    broken_ = broken_ || head_ - tail_ > capacity_;
    if (broken_) return {};
  }
  return {data_ + (tail_ & (capacity_ - 1)), static_cast<std::size_t>(head_ - tail_)};
}

// Goes on in the large ring if some of the bytes up to head_ are there.
void RingReader::follow_to_large() noexcept {
  const std::uint64_t grown_at = control_->grown_at.load(std::memory_order_relaxed);
  if (grown_at == 0 || grown_at - 1 >= head_) return;
  const std::uint64_t left = grown_at - 1 - tail_;  // bytes in front of it
  if (left > memory_.small_bytes) {
    broken_ = true;
    return;
  }
  const std::uint64_t from = tail_ & (memory_.small_bytes - 1);
  data_ = memory_.large;
  capacity_ = memory_.large_bytes;
  std::memcpy(data_ + (tail_ & (capacity_ - 1)), memory_.small + from,
              static_cast<std::size_t>(left));
}

void RingReader::consume(std::size_t bytes) noexcept {
  tail_ += bytes;
  if (tail_ - shown_ < capacity_ / 4 && tail_ != head_) return;
  shown_ = tail_;
  control_->tail.store(tail_, std::memory_order_release);
}

}  // namespace weft::transport::shm
