// SPDX-License-Identifier: Apache-2.0
// The control messages of a connection over verbs (docs/rdma.md), beside the bytes of docs/wire.md:
// a hello over TCP, then notes and immediates on the queue pair. Pure functions; decoders check
// every byte, as a stranger may have sent it. All numbers are little-endian.
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

// Each end's first message over TCP: how the peer reaches its queue pair and its ring.
struct Hello {
  static constexpr std::size_t kBytes = 64;

  Fabric fabric = Fabric::Roce;
  GidBytes gid{};
  std::uint16_t lid = 0;
  std::uint32_t queue_pair = 0;  // 24 bits
  std::uint32_t packet = 0;      // number of the first packet, 24 bits
  std::uint32_t mtu_bytes = 0;   // a power of two from 256 to 4096
  std::uint32_t receives = 0;    // notes and immediates that it can take before it grants more
  std::uint32_t ring_bytes = 0;  // a power of two from 4 KiB to 1 GiB
  std::uint32_t ring_key = 0;
  std::uint64_t ring_address = 0;
  std::uint32_t max_write_bytes = 0;  // of one RDMA write to this end

  friend bool operator==(const Hello&, const Hello&) = default;
};

std::array<std::byte, Hello::kBytes> encode(const Hello& hello);
// Returns PeerLost if the bytes are not a hello or contain an impossible number.
Result<Hello> decode_hello(Bytes bytes);

// A control message on the queue pair. It fills a receive buffer of kBytes.
struct Note {
  static constexpr std::size_t kBytes = 40;
  enum class Kind : std::uint32_t {
    Room = 1,   // position: bytes read from the ring in total
    Waits = 2,  // a piece of `bytes` waits for a place; it follows at `position` of the ring
    // The first `bytes` of the piece may be written to `address` with `key`. If `bytes` is 0, the
    // piece must be sent through the ring.
    Place = 3,
    Finished = 4,  // no more bytes follow
  };
  Kind kind = Kind::Room;
  std::uint32_t granted = 0;  // receives posted again in total; wraps around
  std::uint32_t key = 0;
  std::uint64_t position = 0;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;

  friend bool operator==(const Note&, const Note&) = default;
};

std::array<std::byte, Note::kBytes> encode(const Note& note);
std::optional<Note> decode_note(Bytes bytes);

// The immediate of a write is the number of new bytes in the ring, or kPlaced.
constexpr std::uint32_t kPlaced = 0x80000000;  // the piece has been written to its place

}  // namespace weft::transport::verbs
