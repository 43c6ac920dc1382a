// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/transport/little_endian.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::frame {

namespace {

constexpr std::array<char, 4> kMagic = {'W', 'E', 'F', 'T'};
constexpr std::uint16_t kVersion = 1;

using little_endian::get;
using little_endian::put;

// Describes bytes from a stranger for a log: "47 45 54 20 'GET '".
std::string in_words(Bytes bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  std::string text;
  for (const std::byte byte : bytes) {
    const auto value = std::to_integer<unsigned>(byte);
    hex += kDigits[value >> 4];
    hex += kDigits[value & 15];
    hex += ' ';
    text += value >= 0x20 && value < 0x7f ? static_cast<char>(value) : '.';
  }
  return hex + "'" + text + "'";
}

std::string above(const char* what, std::uint64_t value, std::uint64_t limit) {
  return std::string(what) + ": " + std::to_string(value) + ", and at most " +
         std::to_string(limit) + " are allowed";
}

}  // namespace

std::array<std::byte, kPreambleBytes> preamble() {
  std::array<std::byte, kPreambleBytes> bytes{};
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  put<std::uint16_t>(&bytes[4], kVersion);  // the remaining two bytes are flags: none yet
  return bytes;
}

std::optional<std::string> why_stranger(Bytes seen) {
  if (seen.empty()) return std::nullopt;
  const Bytes first = seen.first(std::min(seen.size(), kPreambleBytes));
  if (std::memcmp(first.data(), kMagic.data(), std::min(first.size(), kMagic.size())) != 0) {
    return "its first bytes were " + in_words(first) + ", so it is not a Weft process";
  }
  if (first.size() < kPreambleBytes) return std::nullopt;
  const auto version = get<std::uint16_t>(&first[4]);
  const auto flags = get<std::uint16_t>(&first[6]);
  if (version != kVersion || flags != 0) {
    return "it speaks version " + std::to_string(version) + " (flags " + std::to_string(flags) +
           ") of the wire format and this process version " + std::to_string(kVersion) +
           "; run the same Weft on both";
  }
  return std::nullopt;
}

std::string text_of(Bytes words) {
  std::string text;
  for (const std::byte byte : words) {
    const auto letter = std::to_integer<unsigned char>(byte);
    text += letter < ' ' || letter == 0x7f ? ' ' : static_cast<char>(letter);
  }
  return text;
}

Head decode_head(Bytes bytes) {
  return {get<std::uint32_t>(&bytes[0]), get<std::uint32_t>(&bytes[4])};
}

std::optional<std::string> why_refused(const Head& head, const Capabilities& limits) {
  if (head.is_goodbye()) {
    if (head.header_bytes > kMaxGoodbye)
      return above("bytes of a goodbye", head.header_bytes, kMaxGoodbye);
    return std::nullopt;
  }
  if (head.header_bytes > limits.max_header)
    return above("bytes of a header", head.header_bytes, limits.max_header);
  if (head.payloads > limits.max_payloads)
    return above("payloads of a message", head.payloads, limits.max_payloads);
  return std::nullopt;
}

std::optional<std::uint64_t> decode_sizes(Bytes table, const Capabilities& limits,
                                          std::vector<std::uint64_t>& sizes) {
  sizes.clear();
  std::uint64_t total = 0;
  for (std::size_t at = 0; at + kSizeBytes <= table.size(); at += kSizeBytes) {
    const auto size = get<std::uint64_t>(&table[at]);
    if (__builtin_add_overflow(total, size, &total) || total > limits.max_message)
      return std::nullopt;
    sizes.push_back(size);
  }
  return total;
}

void encode_front(std::size_t header_bytes, std::span<const Slice> payloads,
                  std::vector<std::byte>& front) {
  front.resize(kHeadBytes + payloads.size() * kSizeBytes);
  put(&front[0], static_cast<std::uint32_t>(header_bytes));
  put(&front[4], static_cast<std::uint32_t>(payloads.size()));
  std::byte* at = front.data() + kHeadBytes;
  for (const Slice& payload : payloads) {
    put(at, std::uint64_t{payload.bytes});
    at += kSizeBytes;
  }
}

std::vector<std::byte> encode_goodbye(std::string_view reason) {
  const std::string_view cut = reason.substr(0, kMaxGoodbye);
  std::vector<std::byte> bytes(kHeadBytes + cut.size());
  put(&bytes[0], static_cast<std::uint32_t>(cut.size()));
  put(&bytes[4], kGoodbyePayloads);
  if (!cut.empty()) std::memcpy(&bytes[kHeadBytes], cut.data(), cut.size());
  return bytes;
}

std::optional<std::string> why_too_large(std::size_t header_bytes, std::size_t payloads,
                                         std::optional<std::uint64_t> total,
                                         const Capabilities& limits) {
  if (header_bytes > limits.max_header) {
    return above("bytes of the header (max_header)", header_bytes, limits.max_header) +
           "; put the rest in a payload";
  }
  if (payloads > limits.max_payloads) {
    return above("payloads (max_payloads)", payloads, limits.max_payloads) +
           "; send several messages";
  }
  if (!total || *total > limits.max_message) {
    return above("bytes of all payloads (max_message)", total.value_or(~std::uint64_t{0}),
                 limits.max_message) +
           "; send several messages";
  }
  return std::nullopt;
}

std::optional<std::uint64_t> total_of(std::span<const Slice> payloads) {
  std::uint64_t total = 0;
  for (const Slice& payload : payloads) {
    if (__builtin_add_overflow(total, std::uint64_t{payload.bytes}, &total)) return std::nullopt;
  }
  return total;
}

std::optional<std::string> why_misfit(
    std::span<const Slice> destinations, std::span<const std::uint64_t> sizes,
    const std::function<std::optional<std::string>(const Slice&)>& why_not) {
  if (destinations.empty()) return std::nullopt;
  if (destinations.size() != sizes.size()) {
    return std::to_string(destinations.size()) + " destinations for " +
           std::to_string(sizes.size()) + " payloads; name one for each, or none to discard them";
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::string which = "destination " + std::to_string(i);
    if (destinations[i].bytes != sizes[i]) {
      return which + " has " + std::to_string(destinations[i].bytes) + " bytes, its payload " +
             std::to_string(sizes[i]);
    }
    if (const auto why = why_not(destinations[i])) return which + " is " + *why;
  }
  return std::nullopt;
}

}  // namespace weft::transport::frame
