// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes numbers on the wire (docs/wire.md) as little-endian, on every machine.
// Callers check lengths.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <vector>

namespace weft::transport::little_endian {

template <std::unsigned_integral T>
void put(std::byte* to, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

template <std::unsigned_integral T>
void append(std::vector<std::byte>& to, T value) {
  to.resize(to.size() + sizeof value);
  put(to.data() + to.size() - sizeof value, value);
}

template <std::unsigned_integral T>
T get(const std::byte* from) {
  T value = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&value, from, sizeof value);  // the compiler does not turn the loop into this
  } else {
    for (std::size_t i = 0; i < sizeof value; ++i)
      value = static_cast<T>(value | static_cast<T>(from[i]) << (8 * i));
  }
  return value;
}

}  // namespace weft::transport::little_endian
