// SPDX-License-Identifier: Apache-2.0
// One direction of a connection, beside its ring: a long piece is not copied into the ring, but
// lent. The lender shows its address, and the borrower copies the bytes out of the lender's memory
// (peer_memory.h), then returns the piece. The piece follows all bytes that the lender has written
// to the ring; it writes no more before it has the piece back, and lends one at a time.
//
// The lender may withdraw a piece, and free its memory, at any time: returning and withdrawing
// exclude each other, and bytes that were not returned are not delivered. Each process checks the
// other's numbers: the borrower uses an address only to read the peer's memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <weft/transport/shm/peer_memory.h>

namespace weft::transport::shm {

// Lies in the segment.
struct LoanControl {
  // Written by the lender: four times the number of the loan, and its phase. The borrower changes
  // only the phase, from Lent to Returned.
  alignas(64) std::atomic<std::uint64_t> state;
  std::atomic<std::uint64_t> address;
  std::atomic<std::uint64_t> bytes;
  alignas(64) std::atomic<std::uint64_t> read;  // by the borrower: bytes that it has read
};

// Used by the thread that writes, except where it says otherwise.
class Lender {
 public:
  using Bytes = std::span<const std::byte>;
  explicit Lender(LoanControl* control) : control_(control) {}

  // Requires !is_out().
  void lend(Bytes piece) noexcept;
  // True from lend() to take_back(). Thread-safe.
  bool is_out() const noexcept { return state_.load(std::memory_order_relaxed) != 0; }
  // True if the borrower has returned the piece. Thread-safe.
  bool is_back() const noexcept;
  // Requires is_back(). Returns how many bytes of the piece, from the first one, the borrower has
  // read; std::nullopt if its number is impossible. If it could not read all, no further piece is
  // to be lent.
  std::optional<std::size_t> take_back() noexcept;
  bool has_failed() const noexcept { return has_failed_; }
  // The borrower delivers nothing of the piece that is out any more, and nothing is lent after
  // this. Thread-safe.
  void withdraw() noexcept;
  bool has_withdrawn() const noexcept { return withdrawn_.load(std::memory_order_relaxed); }

 private:
  LoanControl* control_;
  std::uint64_t number_ = 0;
  std::size_t bytes_ = 0;
  bool has_failed_ = false;
  std::atomic<std::uint64_t> state_{0};  // of the piece that is out; 0: none
  std::atomic<bool> withdrawn_{false};
};

// Used on the loop.
class Borrower {
 public:
  using Bytes = std::span<const std::byte>;
  explicit Borrower(LoanControl* control) : control_(control) {}

  void open(const PeerMemory& memory) { memory_ = memory; }
  // Identifies the piece that is lent now; 0 if none is. Thread-safe.
  std::uint64_t lent() const noexcept;
  // Moves up to to.size() bytes of the piece to `to`, and returns the piece with its last byte, or
  // if it cannot be read. Returns how many; 0 if no piece is lent any more. Takes a part at a time,
  // so that the loop can do its other work.
  std::size_t read(std::span<std::byte> to) noexcept;
  // As ByteStream::peek() and consume(): the first bytes of the piece, copied to memory of this
  // object.
  Bytes peek() noexcept;
  void consume(std::size_t bytes) noexcept { seen_ += bytes; }
  // True if peek() has copied bytes that are not consumed. They precede those of the ring.
  bool has_copied() const noexcept { return seen_ < copied_.size(); }
  // Returns true once for each piece that was returned: its lender may wait for it.
  bool take_returned() noexcept { return std::exchange(has_returned_, false); }

 private:
  bool give_back() noexcept;

  LoanControl* control_;
  std::optional<PeerMemory> memory_;
  std::uint64_t state_ = 0;  // of the piece that is being read, and a copy of its numbers
  std::uint64_t address_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t done_ = 0;
  bool has_returned_ = false;
  std::vector<std::byte> copied_;
  std::size_t seen_ = 0;
};

}  // namespace weft::transport::shm
