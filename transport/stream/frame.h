// SPDX-License-Identifier: Apache-2.0
// The bytes of a connection, as docs/wire.md specifies them: a preamble, then messages, then a
// goodbye. Pure functions over untrusted bytes: every size is checked against the limits before
// memory is allocated for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weft/transport/connection.h>

namespace weft::transport::frame {

using Bytes = std::span<const std::byte>;

constexpr std::size_t kPreambleBytes = 8;
constexpr std::size_t kHeadBytes = 8;
constexpr std::size_t kSizeBytes = 8;                   // of one entry in the table of sizes
constexpr std::uint32_t kGoodbyePayloads = 0xffffffff;  // in place of the number of payloads
constexpr std::size_t kMaxGoodbye = 512;                // bytes of the reason

std::array<std::byte, kPreambleBytes> preamble();
// Returns why the first bytes of a stream (up to kPreambleBytes) are not a preamble, or are one of
// another version. Empty if they may be one: fewer bytes are checked as far as they reach.
std::optional<std::string> why_stranger(Bytes seen);

// Makes one line of a peer's text, fit for logs, whatever bytes it contains.
std::string text_of(Bytes words);

// The beginning of every frame. The table of sizes, the header and the payloads follow.
struct Head {
  std::uint32_t header_bytes = 0;
  std::uint32_t payloads = 0;

  bool is_goodbye() const { return payloads == kGoodbyePayloads; }
  // Bytes of head, table and header together. Call it only after why_refused() returned nothing;
  // the limits then bound it.
  std::size_t front_bytes() const {
    return kHeadBytes + (is_goodbye() ? 0 : std::size_t{payloads} * kSizeBytes) + header_bytes;
  }
};

// Number of zeros up to the next multiple of `unit`, a power of two.
constexpr std::size_t padding(std::uint64_t bytes, std::size_t unit) {
  return static_cast<std::size_t>(-bytes & (unit - 1));
}
constexpr std::size_t kMaxUnit = 64;
// Payloads begin at a multiple of this behind the front, in a stream of that unit: aligned for
// vector instructions and for elements of every type.
constexpr std::size_t payload_unit(std::size_t unit) { return unit < 16 ? unit : 16; }

// Requires kHeadBytes bytes.
Head decode_head(Bytes bytes);
// Returns which limit the head exceeds, in words.
std::optional<std::string> why_refused(const Head& head, const Capabilities& limits);

// Reads the table that follows the head into `sizes`. Returns their sum, or nothing if the sum
// exceeds the limit.
std::optional<std::uint64_t> decode_sizes(Bytes table, const Capabilities& limits,
                                          std::vector<std::uint64_t>& sizes);

// Replaces the content of `front` by head and table; the header follows them on the wire. The
// message must have passed why_too_large().
void encode_front(std::size_t header_bytes, std::span<const Slice> payloads,
                  std::vector<std::byte>& front);
// Encodes a whole goodbye; a reason longer than kMaxGoodbye is cut.
std::vector<std::byte> encode_goodbye(std::string_view reason);

// Returns which limit a message to be sent exceeds, in words. `total` is the sum of the payloads'
// bytes, or nothing if it overflows.
std::optional<std::string> why_too_large(std::size_t header_bytes, std::size_t payloads,
                                         std::optional<std::uint64_t> total,
                                         const Capabilities& limits);
std::optional<std::uint64_t> total_of(std::span<const Slice> payloads);

// Returns why the destinations do not fit payloads of these sizes, in words. `why_not` returns why
// the connection cannot write to one slice, in words that continue "destination 0 is …". An empty
// list always fits: it discards the payloads.
std::optional<std::string> why_misfit(
    std::span<const Slice> destinations, std::span<const std::uint64_t> sizes,
    const std::function<std::optional<std::string>(const Slice&)>& why_not);

}  // namespace weft::transport::frame
