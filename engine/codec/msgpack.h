// SPDX-License-Identifier: Apache-2.0
// msgpack-cxx as Weft uses it, and the packer type of all of Weft's adaptors.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef MSGPACK_NO_BOOST
#define MSGPACK_NO_BOOST
#endif
#include <msgpack.hpp>

#include <weft/engine/codec/buffer.h>

namespace weft::codec {

using Packer = msgpack::packer<Buffer>;

}  // namespace weft::codec

// Floating-point numbers keep their bits. (msgpack writes whole numbers as integers, which have no
// -0.) clang-format takes the macro for the head of a function.
// clang-format off
namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(v1) {

template <>
inline weft::codec::Packer& weft::codec::Packer::pack_float(float value) {
  char bytes[5] = {static_cast<char>(0xca)};
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  _msgpack_store32(&bytes[1], bits);
  append_buffer(bytes, sizeof bytes);
  return *this;
}
template <>
inline weft::codec::Packer& weft::codec::Packer::pack_double(double value) {
  char bytes[9] = {static_cast<char>(0xcb)};
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  _msgpack_store64(&bytes[1], bits);
  append_buffer(bytes, sizeof bytes);
  return *this;
}

}  // MSGPACK_API_VERSION_NAMESPACE
}  // namespace msgpack
// clang-format on
