// SPDX-License-Identifier: Apache-2.0
// How a connection that carries device memory encodes its messages as messages of the connection
// below it (docs/wire.md). Every message below begins with a byte that says its kind:
//
//   whole   the header, then the payloads as they are, at most kChunkBytes of them
//   lead    the payloads' sizes, then the header; the payloads follow as chunks
//   chunk   1 to kChunkBytes bytes of one payload, in order; no header
//
// So a receiver needs at most one chunk of pinned memory at a time, whatever the message's size.
// Pure functions over untrusted bytes.
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

// Long enough that a copy to the GPU takes longer than starting it, short enough that several
// chunks fit into a cache.
constexpr std::size_t kChunkBytes = 512 << 10;

enum class Kind : std::uint8_t { Whole = 1, Lead = 2, Chunk = 3 };

constexpr std::size_t kKindBytes = 1;
constexpr std::size_t kCountBytes = 4;  // of a lead, after its kind; 8 bytes for each size follow

// Capabilities of a connection that writes its messages this way over one with capabilities
// `below`.
Capabilities capabilities_over(const Capabilities& below);

// Both encoders replace the content of `front`. The caller has checked the connection's limits.
void encode_whole(Bytes header, std::vector<std::byte>& front);
std::vector<std::byte> encode_lead(Bytes header, std::span<const Slice> payloads);

// A decoded message, or in words why no Weft process can have sent it.
struct Decoded {
  Kind kind = Kind::Whole;
  Bytes header;  // of the message above; points into the decoded message
  std::uint64_t total = 0;
  std::optional<std::string> wrong;
};
// Fills `sizes` with those of the message above (for a chunk: its own). The limits bound its
// memory.
Decoded decode(const Arrival& below, const Capabilities& limits, std::vector<std::uint64_t>& sizes);

}  // namespace weft::transport::staged
