// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/transport/little_endian.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::staged {

namespace {

constexpr std::size_t kLeadBytes = kKindBytes + kCountBytes;

// Reserved so that the pieces of one message find room even if the queue of the connection below is
// full.
constexpr std::size_t kReserved = 32;

Decoded wrong(std::string text) {
  Decoded decoded;
  decoded.wrong = std::move(text);
  return decoded;
}

Decoded decode_chunk(const Arrival& below) {
  Decoded decoded{.kind = Kind::Chunk};
  if (below.header.size() != kKindBytes || below.sizes.size() != 1)
    return wrong("a chunk that is not a single payload");
  decoded.total = below.sizes[0];
  if (decoded.total == 0 || decoded.total > kChunkBytes) {
    return wrong("a chunk of " + std::to_string(decoded.total) + " bytes");
  }
  return decoded;
}

Decoded decode_whole(const Arrival& below, std::vector<std::uint64_t>& sizes) {
  Decoded decoded{.kind = Kind::Whole, .header = below.header.subspan(kKindBytes)};
  sizes.assign(below.sizes.begin(), below.sizes.end());
  for (const std::uint64_t bytes : sizes)
    decoded.total += bytes;  // the connection below has checked the sum
  if (decoded.total > kChunkBytes) {
    return wrong("payloads of " + std::to_string(decoded.total) +
                 " bytes in one piece, where chunks are due");
  }
  return decoded;
}

Decoded decode_lead(const Arrival& below, const Capabilities& limits,
                    std::vector<std::uint64_t>& sizes) {
  if (below.header.size() < kLeadBytes || !below.sizes.empty())
    return wrong("a lead of the wrong shape");
  const std::size_t payloads = little_endian::get<std::uint32_t>(&below.header[kKindBytes]);
  if (payloads > limits.max_payloads) return wrong(std::to_string(payloads) + " payloads");
  const std::size_t front = kLeadBytes + payloads * frame::kSizeBytes;
  if (below.header.size() < front || below.header.size() - front > limits.max_header)
    return wrong("a truncated lead");
  const auto total =
      frame::decode_sizes(below.header.subspan(kLeadBytes, front - kLeadBytes), limits, sizes);
  if (!total)
    return wrong("payloads of more than " + std::to_string(limits.max_message) + " bytes");
  if (*total <= kChunkBytes) return wrong("chunks although the payloads fit into one piece");
  return {.kind = Kind::Lead, .header = below.header.subspan(front), .total = *total};
}

}  // namespace

Capabilities capabilities_over(const Capabilities& below) {
  Capabilities own = below;
  own.device_memory = true;
  own.one_sided = false;
  own.direct_bytes = 0;
  own.inline_bytes = std::min(below.inline_bytes, kChunkBytes);
  own.inline_bytes -= std::min(own.inline_bytes, kKindBytes);
  own.max_payloads = std::min(below.max_payloads, below.max_header / (8 * frame::kSizeBytes));
  own.max_header = below.max_header - kLeadBytes - own.max_payloads * frame::kSizeBytes;
  own.max_queued = below.max_queued - std::min(kReserved, below.max_queued / 2);
  return own;
}

void encode_whole(Bytes header, std::vector<std::byte>& front) {
  front.clear();
  front.push_back(static_cast<std::byte>(Kind::Whole));
  front.insert(front.end(), header.begin(), header.end());
}

std::vector<std::byte> encode_lead(Bytes header, std::span<const Slice> payloads) {
  std::vector<std::byte> front;
  front.reserve(kLeadBytes + payloads.size() * frame::kSizeBytes + header.size());
  front.push_back(static_cast<std::byte>(Kind::Lead));
  little_endian::append(front, static_cast<std::uint32_t>(payloads.size()));
  for (const Slice& payload : payloads) little_endian::append(front, std::uint64_t{payload.bytes});
  front.insert(front.end(), header.begin(), header.end());
  return front;
}

Decoded decode(const Arrival& below, const Capabilities& limits,
               std::vector<std::uint64_t>& sizes) {
  if (below.header.size() < kKindBytes)
    return wrong("a message without a kind; the peer's connection is not staged");
  switch (static_cast<Kind>(below.header[0])) {
    case Kind::Whole: return decode_whole(below, sizes);
    case Kind::Lead: return decode_lead(below, limits, sizes);
    case Kind::Chunk: return decode_chunk(below);
  }
  return wrong("a message of kind " + std::to_string(std::to_integer<int>(below.header[0])) +
               "; the peer's connection is not staged");
}

}  // namespace weft::transport::staged
