// The bytes of a lane, as docs/wire.md specifies them: a preamble, then messages, then a goodbye.
// Pure functions over bytes that a stranger may have sent: every size is checked against the limits
// before anybody allocates for it.
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
constexpr std::uint32_t kGoodbyePayloads = 0xffffffff;  // stands where the number of payloads would
constexpr std::size_t kMaxGoodbye = 512;                // bytes of its reason

std::array<std::byte, kPreambleBytes> preamble();
// Why the first bytes of a stream (up to kPreambleBytes) are not those of a preamble, or of one we
// do not understand. Nothing where they may be: fewer bytes are checked as far as they go.
std::optional<std::string> why_stranger(Bytes seen);

// Words of a peer's, which end up in logs: one line, whatever it wrote.
std::string text_of(Bytes words);

// What every frame begins with. Behind it: the table of sizes, then the header, then the payloads.
struct Head {
  std::uint32_t header_bytes = 0;
  std::uint32_t payloads = 0;

  bool is_goodbye() const { return payloads == kGoodbyePayloads; }
  // Of head, table and header together. Only after why_refused() found nothing: bounded by the
  // limits then.
  std::size_t front_bytes() const {
    return kHeadBytes + (is_goodbye() ? 0 : std::size_t{payloads} * kSizeBytes) + header_bytes;
  }
};

// Zeros up to the next multiple of `unit`, a power of two.
constexpr std::size_t padding(std::uint64_t bytes, std::size_t unit) {
  return static_cast<std::size_t>(-bytes & (unit - 1));
}
constexpr std::size_t kMaxUnit = 64;
// Where payloads begin behind the front, in a stream of that unit: fit for vectors, and for
// elements of every type.
constexpr std::size_t payload_unit(std::size_t unit) { return unit < 16 ? unit : 16; }

// Needs kHeadBytes of them.
Head decode_head(Bytes bytes);
// Which limit it exceeds, in words.
std::optional<std::string> why_refused(const Head& head, const Capabilities& limits);

// Reads the table that stands behind the head into `sizes`, and their sum. Nothing where the sum
// exceeds the limit.
std::optional<std::uint64_t> decode_sizes(Bytes table, const Capabilities& limits,
                                          std::vector<std::uint64_t>& sizes);

// Writes head and table to `front`, whose content is replaced; the header follows it on the wire.
// The message must have passed why_too_large().
void encode_front(std::size_t header_bytes, std::span<const Slice> payloads,
                  std::vector<std::byte>& front);
// A whole goodbye; a longer reason is cut.
std::vector<std::byte> encode_goodbye(std::string_view reason);

// Which limit a message to be sent exceeds, in words. `total` is the sum of the payloads' bytes, or
// nothing where that overflows.
std::optional<std::string> why_too_large(std::size_t header_bytes, std::size_t payloads,
                                         std::optional<std::uint64_t> total,
                                         const Capabilities& limits);
std::optional<std::uint64_t> total_of(std::span<const Slice> payloads);

// Why destinations do not fit payloads of these sizes, in words; `why_not` says of one why the lane
// cannot write there (fit for "destination 0 is ..."). None at all fit: they throw the payloads
// away.
std::optional<std::string> why_misfit(
    std::span<const Slice> destinations, std::span<const std::uint64_t> sizes,
    const std::function<std::optional<std::string>(const Slice&)>& why_not);

}  // namespace weft::transport::frame
