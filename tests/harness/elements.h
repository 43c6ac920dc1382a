// SPDX-License-Identifier: Apache-2.0
// Converts elements of every dtype to and from double, for the fakes' reductions and the tests'
// expectations.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include <weft/base/dtype.h>
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/kernels/float16.h>

namespace weft::harness {

// An 8-bit float of the OCP formats, by its definition.
template <int kMantissaBits, int kBias>
struct Float8 {
  std::uint8_t bits = 0;

  double number() const {
    constexpr int kFractions = 1 << kMantissaBits;
    const int exponent = (bits & 0x7f) >> kMantissaBits;
    const double fraction = static_cast<double>(bits % kFractions) / kFractions;
    const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - kBias)
                                           : std::ldexp(1 + fraction, exponent - kBias);
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
  }
  // Returns the nearest finite value.
  static Float8 nearest(double number) {
    constexpr int kLargest = kMantissaBits == 3 ? 0x7e : 0x7b;  // E4M3 has no infinity, E5M2 has
    Float8 best;
    for (int code = 0; code <= kLargest; ++code) {
      const Float8 candidate{static_cast<std::uint8_t>(code | (number < 0 ? 0x80 : 0))};
      if (std::abs(candidate.number() - number) < std::abs(best.number() - number))
        best = candidate;
    }
    return best;
  }
};
using Float8E4M3 = Float8<3, 7>;
using Float8E5M2 = Float8<2, 15>;

// Calls `body` with a value of the type that the dtype's elements have in memory; for complex
// numbers, of the type of their parts.
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
    case Dtype::Float16: return body(kernels::Half());
    case Dtype::BFloat16: return body(kernels::BFloat16());
    case Dtype::ComplexFloat32:
    case Dtype::Float32: return body(float());
    case Dtype::ComplexFloat64:
    case Dtype::Float64: return body(double());
    case Dtype::Float8E4M3: return body(Float8E4M3());
    case Dtype::Float8E5M2: return body(Float8E5M2());
  }
  broken("no such Dtype");
}

inline bool is_complex(Dtype dtype) {
  return dtype == Dtype::ComplexFloat32 || dtype == Dtype::ComplexFloat64;
}

// Returns the index-th number in the memory; a complex number counts as two.
inline double load(Dtype dtype, const void* data, std::size_t index) {
  return with_type(dtype, [&](auto value) {
    using T = decltype(value);
    std::memcpy(&value, static_cast<const std::byte*>(data) + index * sizeof(T), sizeof(T));
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<double>(value);
    } else if constexpr (requires { value.number(); }) {
      return value.number();
    } else {
      return static_cast<double>(kernels::widen(value));
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
    } else if constexpr (requires { value.number(); }) {
      value = T::nearest(number);
    } else {
      value = kernels::Narrow<T>::from(static_cast<float>(number));
    }
    std::memcpy(static_cast<std::byte*>(data) + index * sizeof(T), &value, sizeof(T));
  });
}

// Returns how many numbers fit `bytes` bytes.
inline std::size_t numbers_in(Dtype dtype, std::size_t bytes) {
  return bytes / (is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype));
}

}  // namespace weft::harness
