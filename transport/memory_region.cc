// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/little_endian.h>
#include <weft/transport/memory_region.h>

namespace weft::transport {

std::array<std::byte, RegionKey::kBytes> RegionKey::encode() const {
  std::array<std::byte, kBytes> result{};
  little_endian::put(&result[0], address);
  little_endian::put(&result[8], bytes);
  little_endian::put(&result[16], token);
  return result;
}

std::optional<RegionKey> RegionKey::decode(std::span<const std::byte> bytes) {
  if (bytes.size() != kBytes) return std::nullopt;
  using little_endian::get;
  return RegionKey{get<std::uint64_t>(&bytes[0]), get<std::uint64_t>(&bytes[8]),
                   get<std::uint64_t>(&bytes[16])};
}

}  // namespace weft::transport
