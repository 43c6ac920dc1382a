// SPDX-License-Identifier: Apache-2.0
// The two 16-bit floating-point types as bits, and their conversions: they round to nearest even
// and keep subnormals; NaN stays NaN (its payload is undefined). The conversions have no branches
// on the host, so loops over them vectorise; on a GPU each is one instruction.
#pragma once

#include <cstdint>

// Marks every element function: usable on host and device, and inlined into the loop that calls it.
#if defined(__CUDACC__)
#define WEFT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WEFT_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace weft::kernels {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

WEFT_HOST_DEVICE std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}
WEFT_HOST_DEVICE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The type in which elements are computed: fp16 and bf16 in fp32.
WEFT_HOST_DEVICE float widen(float value) { return value; }
WEFT_HOST_DEVICE double widen(double value) { return value; }
WEFT_HOST_DEVICE float widen(BFloat16 value) {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}

WEFT_HOST_DEVICE float widen(Half value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  constexpr std::uint32_t kExponent = 31u << 23;  // fp16's exponent field, moved to fp32's place
  constexpr std::uint32_t kRebias = (127u - 15u) << 23;
  const std::uint32_t bits = value.bits;
  const std::uint32_t shifted = (bits & 0x7fffu) << 13;
  const std::uint32_t exponent = shifted & kExponent;
  const std::uint32_t normal = shifted + kRebias;
  // A subnormal is read as 2^-14 * (1 + fraction), and then 2^-14 is subtracted again. That is
  // exact and uses no fp32 subnormal, so it also works under flush-to-zero.
  constexpr std::uint32_t kSmallest = 113u << 23;  // 2^-14
  const std::uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(kSmallest));
  const std::uint32_t special = normal + kRebias;  // infinity and NaN
  const std::uint32_t magnitude =
      exponent == 0 ? subnormal : (exponent == kExponent ? special : normal);
  return float_of(magnitude | (bits & 0x8000u) << 16);
#endif
}

template <class T>
struct Narrow;

template <>
struct Narrow<float> {
  WEFT_HOST_DEVICE static float from(float value) { return value; }
  WEFT_HOST_DEVICE static float from(double value) { return static_cast<float>(value); }
};

template <>
struct Narrow<double> {
  WEFT_HOST_DEVICE static double from(double value) { return value; }
};

template <>
struct Narrow<Half> {
  WEFT_HOST_DEVICE static Half from(float value) {
#if defined(__CUDA_ARCH__)
    Half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#else
    const std::uint32_t bits = bits_of(value);
    const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
    // 2^16; smaller values that round up to it carry into infinity by themselves.
    constexpr std::int32_t kTooLarge = 143 << 23;
    constexpr std::int32_t kSmallestNormal = 113 << 23;
    constexpr std::int32_t kInfinity = 255 << 23;
    const std::int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 makes the adder round at 2^-24, fp16's last place below 2^-14.
    const auto subnormal =
        static_cast<std::int32_t>(bits_of(float_of(static_cast<std::uint32_t>(magnitude)) + 0.5f)) -
        (126 << 23);
    const std::int32_t special = magnitude > kInfinity ? 0x7e00 : 0x7c00;
    const std::int32_t result =
        magnitude >= kTooLarge ? special : (magnitude < kSmallestNormal ? subnormal : normal);
    return {
        static_cast<std::uint16_t>(static_cast<std::uint32_t>(result) | (bits >> 16 & 0x8000u))};
#endif
  }
  // Converts through fp32, as libtorch does, and so rounds twice.
  WEFT_HOST_DEVICE static Half from(double value) { return from(static_cast<float>(value)); }
};

template <>
struct Narrow<BFloat16> {
  WEFT_HOST_DEVICE static BFloat16 from(float value) {
#if defined(__CUDA_ARCH__)
    BFloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#else
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const bool is_nan = static_cast<std::int32_t>(bits & 0x7fffffffu) > (255 << 23);
    return {static_cast<std::uint16_t>(is_nan ? 0x7fc0u : rounded)};
#endif
  }
  WEFT_HOST_DEVICE static BFloat16 from(double value) { return from(static_cast<float>(value)); }
};

template <class T, class Value>
WEFT_HOST_DEVICE T narrow(Value value) {
  return Narrow<T>::from(value);
}

}  // namespace weft::kernels
