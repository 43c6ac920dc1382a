// The memory that two processes share for one lane: both rings and what each side says about its
// sleep. Made by one side with memfd, passed as a descriptor, sealed against resizing so that no
// access can fault later.
#pragma once

#include <optional>

#include <weft/base/descriptor.h>
#include <weft/transport/shm/ring.h>

namespace weft::transport::shm {

constexpr std::size_t kRingBytes =
    1 << 20;  // a direction: four chunks of a collective, and they stay in a core's cache

// What a side tells the other, each in its own line.
struct SideControl {
  // It sleeps, or is about to: whoever has something for it sends a byte through the socket.
  alignas(64) std::atomic<std::uint32_t> parked;
  // It has more to write than there was room for.
  alignas(64) std::atomic<std::uint32_t> wants_room;
};

class Segment {
 public:
  enum class Side { Maker, Taker };

  // Throws Busy where there is no memory for it.
  static Segment make();
  // Takes the other side's. Throws PeerLost where it is not such a segment.
  static Segment take(Descriptor memory);
  // Through a socket (transport/unix_socket.h). False where that cannot be now. Throws PeerLost.
  bool pass_to(const Descriptor& socket) const;
  // What was passed so; std::nullopt when it has not come. Throws Busy, and PeerLost where
  // something else came, or the end.
  static std::optional<Segment> take_from(const Descriptor& socket);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) = delete;
  ~Segment();

  const Descriptor& memory() const { return memory_; }
  RingWriter writer() const;
  RingReader reader() const;
  // Once: the taker takes the lane, or its maker, who has waited long enough, gives it up. False
  // where the other was first. A peer that lies about it spoils its own lane: one that was taken
  // and is never served.
  bool accept() const noexcept;
  bool give_up() const noexcept;
  SideControl& mine() const;
  SideControl& theirs() const;

 private:
  struct Control;
  Segment(Descriptor memory, Side side);
  Control& control() const;
  bool decide(std::uint32_t fate) const noexcept;
  std::byte* ring(int direction) const;

  Descriptor memory_;
  Side side_;
  std::byte* base_ = nullptr;
};

}  // namespace weft::transport::shm
