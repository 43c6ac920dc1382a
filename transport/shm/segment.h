// SPDX-License-Identifier: Apache-2.0
// The memory that two processes share for one connection: both rings, what each side lends to the
// other, and flags by which each side tells the other that it sleeps or wants room. One side makes
// it with memfd and passes it as a descriptor. It is sealed against resizing, so that no access can
// fault later.
#pragma once

#include <optional>

#include <weft/base/descriptor.h>
#include <weft/transport/shm/loan.h>
#include <weft/transport/shm/ring.h>

namespace weft::transport::shm {

// Bytes of each direction: four chunks of a collective, which stay in a core's cache.
constexpr std::size_t kRingBytes = 1 << 20;
// The same until that is too small for what is written.
constexpr std::size_t kSmallRingBytes = 128 << 10;

// Flags that one side shows the other, each in its own cache line.
struct SideControl {
  // This side sleeps or is about to: to wake it, the other side sends a byte through the socket.
  alignas(64) std::atomic<std::uint32_t> parked;
  // This side has more to write than there was room for.
  alignas(64) std::atomic<std::uint32_t> wants_room;
  // This side can read what the other one lends.
  alignas(64) std::atomic<std::uint32_t> borrows;
  // The proof (peer_memory.h), and where it lies in this side's memory; 0 until it is there.
  std::atomic<std::uint64_t> proof_address;
  std::atomic<std::uint64_t> proof[2];
};

class Segment {
 public:
  enum class Side { Maker, Taker };

  // Throws Busy if there is not enough memory.
  static Segment make();
  // Maps a segment that the other side made. Throws PeerLost if it is not such a segment.
  static Segment take(Descriptor memory);
  // Passes the segment through a socket (transport/unix_socket.h). Returns false if the socket
  // cannot take it now. Throws PeerLost.
  bool pass_to(const Descriptor& socket) const;
  // Receives a segment that was passed this way; std::nullopt if it has not arrived. Throws Busy,
  // and PeerLost if something else arrived or the socket ended.
  static std::optional<Segment> take_from(const Descriptor& socket);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) = delete;
  ~Segment();

  const Descriptor& memory() const { return memory_; }
  // Closes the descriptor, for when the other side has its own: the mapping stays.
  void let_memory_go() { memory_ = Descriptor(); }
  RingWriter writer() const;
  RingReader reader() const;
  LoanControl* lent() const;      // by this side
  LoanControl* borrowed() const;  // by this side
  // Only one of these succeeds: the taker accepts the connection, or the maker, which has waited
  // long enough, gives it up. Returns false if the other side was first. A peer that lies about it
  // spoils its own connection, which is then accepted and never served.
  bool accept() const noexcept;
  bool give_up() const noexcept;
  SideControl& mine() const;
  SideControl& theirs() const;

 private:
  struct Control;
  Segment(Descriptor memory, Side side);
  Control& control() const;
  bool decide(std::uint32_t fate) const noexcept;
  RingMemory ring(int direction) const;

  Descriptor memory_;
  Side side_;
  std::byte* base_ = nullptr;
};

}  // namespace weft::transport::shm
