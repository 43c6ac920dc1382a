// How a lane that carries device memory writes its messages as messages of the lane below it
// (docs/wire.md). Every message below begins with a byte that says what it is:
//
//   whole   the header behind it, and the payloads as they are: at most kChunkBytes of them
//   lead    the header behind the payloads' sizes; the payloads follow
//   chunk   1 to kChunkBytes bytes of one payload, in order; no header
//
// So a receiver needs no more pinned memory at a time than one chunk, whatever was sent. Pure
// functions over bytes that a stranger may have sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/transport/connection.h>

namespace weft::transport::staged {

using Bytes = std::span<const std::byte>;

// Long enough that a copy to the GPU takes longer than to start it, short enough that several fit
// into a cache.
constexpr std::size_t kChunkBytes = 512 << 10;

enum class Kind : std::uint8_t { Whole = 1, Lead = 2, Chunk = 3 };

constexpr std::size_t kKindBytes = 1;
constexpr std::size_t kCountBytes = 4;  // of a lead, behind its kind; then 8 bytes for each size

// What a lane can do whose messages are written so over one that can do `below`.
Capabilities capabilities_over(const Capabilities& below);

// Both replace the content of `front`; the lane's limits have been checked.
void encode_whole(Bytes header, std::vector<std::byte>& front);
std::vector<std::byte> encode_lead(Bytes header, std::span<const Slice> payloads);

// What came, or in words why nobody of ours sent it.
struct Decoded {
  Kind kind = Kind::Whole;
  Bytes header;  // of the message above; part of what was decoded
  std::uint64_t total = 0;
  std::optional<std::string> wrong;
};
// `sizes` receives those of the message above (of a chunk: its own). Its memory is bounded by the
// limits.
Decoded decode(const Arrival& below, const Capabilities& limits, std::vector<std::uint64_t>& sizes);

}  // namespace weft::transport::staged
