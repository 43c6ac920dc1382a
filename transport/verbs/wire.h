// What the two ends of a lane tell each other beside the bytes of docs/wire.md, as docs/rdma.md
// describes it: a hello over TCP, then notes and immediates on the queue pair. Pure functions over
// bytes that a stranger may have sent. All numbers are little-endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <weft/base/result.h>
#include <weft/transport/verbs/ports.h>

namespace weft::transport::verbs {

using Bytes = std::span<const std::byte>;

// Each end's first message over TCP: how its queue pair and its ring are reached.
struct Hello {
  static constexpr std::size_t kBytes = 64;

  Fabric fabric = Fabric::Roce;
  GidBytes gid{};
  std::uint16_t lid = 0;
  std::uint32_t queue_pair = 0;  // 24 bits
  std::uint32_t packet = 0;      // number of the first one, 24 bits
  std::uint32_t mtu_bytes = 0;   // a power of two from 256 to 4096
  std::uint32_t receives = 0;    // how many notes and immediates fit until some are granted back
  std::uint32_t ring_bytes = 0;  // a power of two from 4 KiB to 1 GiB
  std::uint32_t ring_key = 0;
  std::uint64_t ring_address = 0;
  std::uint32_t max_write_bytes = 0;  // of one RDMA write to it

  friend bool operator==(const Hello&, const Hello&) = default;
};

std::array<std::byte, Hello::kBytes> encode(const Hello& hello);
// PeerLost where these are not those of a hello, or of one with numbers that cannot be.
Result<Hello> decode_hello(Bytes bytes);

// A message on the queue pair, in a receive buffer of kBytes.
struct Note {
  static constexpr std::size_t kBytes = 40;
  enum class Kind : std::uint32_t {
    Room = 1,   // position: bytes of the ring that were ever read
    Waits = 2,  // at `position` of the ring a piece of `bytes` waits for a place
    Place = 3,  // it may be written to `address` with `key`, the first `bytes` of it; through the
                // ring where that is 0
    Finished = 4,  // nothing follows
  };
  Kind kind = Kind::Room;
  std::uint32_t granted = 0;  // receives that were ever posted again; counts around
  std::uint32_t key = 0;
  std::uint64_t position = 0;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;

  friend bool operator==(const Note&, const Note&) = default;
};

std::array<std::byte, Note::kBytes> encode(const Note& note);
std::optional<Note> decode_note(Bytes bytes);

// The immediate of a write: so many bytes are new in the ring, or this.
constexpr std::uint32_t kPlaced = 0x80000000;  // the piece has been written to its place

}  // namespace weft::transport::verbs
