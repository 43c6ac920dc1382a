// SPDX-License-Identifier: Apache-2.0
// Element types, by their libtorch meaning. The numbers go on the wire: append, never renumber.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

enum class Dtype : std::uint8_t {
  UInt8 = 0,
  Int8 = 1,
  Int16 = 2,
  Int32 = 3,
  Int64 = 4,
  Float16 = 5,
  Float32 = 6,
  Float64 = 7,
  ComplexFloat32 = 8,  // pairs of Float32
  ComplexFloat64 = 9,
  Bool = 10,
  BFloat16 = 11,
  Float8E4M3 = 12,
  Float8E5M2 = 13,
  UInt16 = 14,
  UInt32 = 15,
  UInt64 = 16,
};

constexpr std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::UInt8:
    case Dtype::Int8:
    case Dtype::Bool:
    case Dtype::Float8E4M3:
    case Dtype::Float8E5M2: return 1;
    case Dtype::Int16:
    case Dtype::UInt16:
    case Dtype::Float16:
    case Dtype::BFloat16: return 2;
    case Dtype::Int32:
    case Dtype::UInt32:
    case Dtype::Float32: return 4;
    case Dtype::Int64:
    case Dtype::UInt64:
    case Dtype::Float64:
    case Dtype::ComplexFloat32: return 8;
    case Dtype::ComplexFloat64: return 16;
  }
  return 0;
}

constexpr std::string_view name(Dtype dtype) {
  switch (dtype) {
    case Dtype::UInt8: return "uint8";
    case Dtype::Int8: return "int8";
    case Dtype::Int16: return "int16";
    case Dtype::Int32: return "int32";
    case Dtype::Int64: return "int64";
    case Dtype::Float16: return "float16";
    case Dtype::Float32: return "float32";
    case Dtype::Float64: return "float64";
    case Dtype::ComplexFloat32: return "complex64";
    case Dtype::ComplexFloat64: return "complex128";
    case Dtype::Bool: return "bool";
    case Dtype::BFloat16: return "bfloat16";
    case Dtype::Float8E4M3: return "float8_e4m3fn";
    case Dtype::Float8E5M2: return "float8_e5m2";
    case Dtype::UInt16: return "uint16";
    case Dtype::UInt32: return "uint32";
    case Dtype::UInt64: return "uint64";
  }
  return "unknown";
}

// "2 elements of float32" for 8 bytes, as errors name the size of a tensor. Bytes that are no whole
// number of elements, which a peer may send, are "7 bytes of float32".
inline std::string elements_text(std::uint64_t bytes, Dtype dtype) {
  const std::size_t each = size_of(dtype);
  const bool is_whole = each > 0 && bytes % each == 0;
  const std::uint64_t number = is_whole ? bytes / each : bytes;
  return std::to_string(number) + (is_whole ? " element" : " byte") + (number == 1 ? "" : "s") +
         " of " + std::string(name(dtype));
}

}  // namespace weft
