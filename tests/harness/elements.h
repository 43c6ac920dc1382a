// Elements of every dtype as doubles, for tests: what a fake reduces and what a claim expects.
#pragma once

#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <weft/base/dtype.h>
#include <weft/base/error.h>

namespace weft::harness {

// Calls `body` with a value of the type that the dtype's elements have in memory; of complex numbers, their parts'.
template <class Body>
auto with_type(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::Bool:
    case Dtype::UInt8: return body(std::uint8_t());
    case Dtype::Int8: return body(std::int8_t());
    case Dtype::Int16: return body(std::int16_t());
    case Dtype::UInt16: return body(std::uint16_t());
    case Dtype::Int32: return body(std::int32_t());
    case Dtype::UInt32: return body(std::uint32_t());
    case Dtype::Int64: return body(std::int64_t());
    case Dtype::UInt64: return body(std::uint64_t());
    case Dtype::Float16: return body(__half());
    case Dtype::BFloat16: return body(__nv_bfloat16());
    case Dtype::ComplexFloat32:
    case Dtype::Float32: return body(float());
    case Dtype::ComplexFloat64:
    case Dtype::Float64: return body(double());
    case Dtype::Float8E4M3: return body(__nv_fp8_e4m3());
    case Dtype::Float8E5M2: return body(__nv_fp8_e5m2());
  }
  broken("no such Dtype");
}

inline bool is_complex(Dtype dtype) { return dtype == Dtype::ComplexFloat32 || dtype == Dtype::ComplexFloat64; }

// The index-th number in the memory; complex numbers count as two.
inline double load(Dtype dtype, const void* data, std::size_t index) {
  return with_type(dtype, [&](auto value) {
    using T = decltype(value);
    std::memcpy(static_cast<void*>(&value), static_cast<const std::byte*>(data) + index * sizeof(T), sizeof(T));
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<double>(value);
    } else {
      return static_cast<double>(static_cast<float>(value));
    }
  });
}

inline void store(Dtype dtype, void* data, std::size_t index, double number) {
  with_type(dtype, [&](auto value) {
    using T = decltype(value);
    if constexpr (std::is_integral_v<T>) {
      value = static_cast<T>(static_cast<std::int64_t>(number));
    } else if constexpr (std::is_arithmetic_v<T>) {
      value = static_cast<T>(number);
    } else {
      value = T(static_cast<float>(number));
    }
    std::memcpy(static_cast<std::byte*>(data) + index * sizeof(T), static_cast<const void*>(&value), sizeof(T));
  });
}

// How many numbers so many bytes hold.
inline std::size_t numbers_in(Dtype dtype, std::size_t bytes) {
  return bytes / (is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype));
}

}  // namespace weft::harness
