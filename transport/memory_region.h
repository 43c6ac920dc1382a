// One-sided writes: bytes go into memory that its owner has exposed, and nobody there takes part or
// is told. Where a lane has them (Capabilities::one_sided) Connection::one_sided() is the way to
// them.
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

// What a peer must know to write into a region. Its bytes come from the peer: whoever uses one
// checks against `bytes`, and the lane refuses what its owner did not expose.
struct RegionKey {
  static constexpr std::size_t kBytes = 24;  // on the wire: the three, little-endian
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t token = 0;  // the transport's

  std::array<std::byte, kBytes> encode() const;
  // Nothing where these are not kBytes bytes.
  static std::optional<RegionKey> decode(std::span<const std::byte> bytes);
};

// Memory that the peer of one lane may write into while this object lives. Once its destructor has
// returned nothing is written there any more; a put that comes later ends the lane.
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
  // Lets the peer write into this memory. Errors: Caller (no host memory, or read-only), Busy (it
  // cannot be registered), and the lane's where that has ended.
  virtual Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) noexcept = 0;

  // Writes `from` into the peer's region, `offset` bytes behind its begin, in line with the sends
  // of this lane: what is sent later arrives when the bytes are there, so a message may tell of
  // them. `ready` says when `from` may be read; it must not change until the Op is done, and the
  // bytes are there then. Errors: Caller (past the region's end, no host memory), Busy (queue full,
  // `from` cannot be registered).
  virtual Op put(const Slice& from, const RegionKey& to, std::uint64_t offset, Pin pin,
                 Fence ready) noexcept = 0;

 protected:
  ~OneSided() = default;
};

}  // namespace weft::transport
