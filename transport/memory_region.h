// SPDX-License-Identifier: Apache-2.0
// One-sided writes: a peer writes bytes into memory that its owner has exposed; the owner takes no
// part and is not notified. Connection::one_sided() gives access where the connection supports them
// (Capabilities::one_sided).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <weft/base/op.h>
#include <weft/base/result.h>
#include <weft/base/slice.h>

namespace weft::transport {

// The data that a peer needs to write into a region. A key arrives from the peer: code that uses
// one checks against `bytes`, and the connection refuses memory that its owner did not expose.
struct RegionKey {
  static constexpr std::size_t kBytes = 24;  // on the wire: the three fields, little-endian
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t token = 0;  // chosen by the transport

  std::array<std::byte, kBytes> encode() const;
  // Returns nothing if `bytes` is not kBytes long.
  static std::optional<RegionKey> decode(std::span<const std::byte> bytes);
};

// Memory that the peer of one connection may write into while this object lives. Nothing is written
// there once its destructor has returned; a put that arrives later ends the connection.
class MemoryRegion {
 public:
  MemoryRegion(const Slice& memory, RegionKey key, Pin registration)
      : memory_(memory), key_(key), registration_(std::move(registration)) {}

  const Slice& memory() const { return memory_; }
  const RegionKey& key() const { return key_; }

 private:
  Slice memory_;
  RegionKey key_;
  Pin registration_;
};

class OneSided {
 public:
  // Lets the peer write into this memory. Errors: Caller (not host memory, or read-only), Busy (it
  // cannot be registered), and the connection's error if that has ended.
  virtual Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) noexcept = 0;

  // Writes `from` into the peer's region at `offset` bytes, in order with the sends of this
  // connection: a message that is sent later arrives after the bytes, so it may announce them.
  // `ready` says when `from` may be read. `from` must not change until the Op is done; then the
  // bytes are in the region. Errors: Caller (beyond the region's end, not host memory), Busy (queue
  // full, `from` cannot be registered).
  virtual Op put(const Slice& from, const RegionKey& to, std::uint64_t offset, Pin pin,
                 Fence ready) noexcept = 0;

 protected:
  ~OneSided() = default;
};

}  // namespace weft::transport
