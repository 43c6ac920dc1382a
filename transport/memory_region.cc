#include <weft/transport/memory_region.h>

namespace weft::transport {

std::array<std::byte, RegionKey::kBytes> RegionKey::encode() const {
  std::array<std::byte, kBytes> result{};
  std::size_t at = 0;
  for (const std::uint64_t field : {address, bytes, token}) {
    for (int shift = 0; shift < 64; shift += 8) result[at++] = static_cast<std::byte>(field >> shift);
  }
  return result;
}

std::optional<RegionKey> RegionKey::decode(std::span<const std::byte> bytes) {
  if (bytes.size() != kBytes) return std::nullopt;
  RegionKey key;
  std::size_t at = 0;
  for (std::uint64_t* field : {&key.address, &key.bytes, &key.token}) {
    for (int shift = 0; shift < 64; shift += 8) *field |= std::to_integer<std::uint64_t>(bytes[at++]) << shift;
  }
  return key;
}

}  // namespace weft::transport
