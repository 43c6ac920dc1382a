// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/transport/shm/loan.h>

namespace weft::transport::shm {

namespace {

constexpr std::uint64_t kPhases = 4;
enum Phase : std::uint64_t { Lent = 1, Returned = 2, Withdrawn = 3 };

constexpr std::size_t kReadAtOnce = 512 << 10;
constexpr std::size_t kPeekedAtOnce = 64 << 10;

constexpr std::uint64_t in_phase(std::uint64_t state, Phase phase) {
  return state / kPhases * kPhases + phase;
}

}  // namespace

void Lender::lend(Bytes piece) noexcept {
  bytes_ = piece.size();
  const std::uint64_t state = ++number_ * kPhases + Lent;
  control_->address.store(reinterpret_cast<std::uintptr_t>(piece.data()),
                          std::memory_order_relaxed);
  control_->bytes.store(bytes_, std::memory_order_relaxed);
  state_.store(state);
  control_->state.store(state, std::memory_order_release);
  if (withdrawn_.load()) withdraw();
}

bool Lender::is_back() const noexcept {
  const std::uint64_t state = state_.load(std::memory_order_relaxed);
  return state != 0 && control_->state.load(std::memory_order_acquire) == in_phase(state, Returned);
}

std::optional<std::size_t> Lender::take_back() noexcept {
  state_.store(0, std::memory_order_relaxed);
  const std::uint64_t read = control_->read.load(std::memory_order_relaxed);
  if (read > bytes_) return std::nullopt;
  has_failed_ = read < bytes_;
  return static_cast<std::size_t>(read);
}

void Lender::withdraw() noexcept {
  withdrawn_.store(true);
  std::uint64_t state = state_.load();
  if (state != 0) control_->state.compare_exchange_strong(state, in_phase(state, Withdrawn));
  // The caller's later writes to the memory stay behind this.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::uint64_t Borrower::lent() const noexcept {
  const std::uint64_t state = control_->state.load(std::memory_order_acquire);
  return state % kPhases == Lent ? state : 0;
}

std::size_t Borrower::read(std::span<std::byte> to) noexcept {
  const std::uint64_t state = lent();
  if (state == 0 || to.empty()) return 0;
  if (std::exchange(state_, state) != state) {
    address_ = control_->address.load(std::memory_order_relaxed);
    bytes_ = control_->bytes.load(std::memory_order_relaxed);
    done_ = 0;
  }
  const auto wanted = static_cast<std::size_t>(
      std::min<std::uint64_t>(std::min(to.size(), kReadAtOnce), bytes_ - done_));
  if (!memory_ || wanted == 0 || memory_->read(address_ + done_, to.first(wanted)) != 0) {
    give_back();
    return 0;
  }
  // If the piece is still lent, its memory was not freed or changed before it was read.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  done_ += wanted;
  const bool is_good = done_ == bytes_ ? give_back() : lent() == state;
  return is_good ? wanted : 0;
}

bool Borrower::give_back() noexcept {
  control_->read.store(done_, std::memory_order_relaxed);
  std::uint64_t state = state_;
  has_returned_ = control_->state.compare_exchange_strong(state, in_phase(state, Returned));
  return has_returned_;
}

Borrower::Bytes Borrower::peek() noexcept {
  if (!has_copied()) {
    seen_ = 0;
    copied_.resize(kPeekedAtOnce);
    copied_.resize(read(copied_));
  }
  return Bytes(copied_).subspan(seen_);
}

}  // namespace weft::transport::shm
