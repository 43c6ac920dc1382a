// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/from_blob.h>

#include <weft/base/error.h>
#include <weft/kernels/elements.h>
#include <weft/kernels/kernels.h>

#include "tensors.h"

namespace weft::kernels {
namespace {

using testing::HasSubstr;

// fp32 values around every rounding decision of the 16-bit types: each upper half with lower halves
// at, beside and between the ties. Among them are infinities, NaNs, subnormals of all three types
// and both zeros.
at::Tensor all_kinds_of_float() {
  const std::uint32_t lower[] = {0,      1,      0x0fff, 0x1000, 0x1001, 0x17ff, 0x1fff, 0x2000,
                                 0x2fff, 0x3000, 0x3001, 0x5000, 0x6fff, 0x7000, 0x7001, 0x7fff,
                                 0x8000, 0x8001, 0xb000, 0xefff, 0xf000, 0xffff};
  std::vector<std::uint32_t> bits;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t low : lower) bits.push_back(upper << 16 | low);
  }
  return at::from_blob(bits.data(), {static_cast<std::int64_t>(bits.size())}, at::kFloat).clone();
}

at::Tensor all_16_bit_patterns(at::ScalarType type) {
  return at::arange(0, 0x10000, at::kInt).to(at::kShort).view(type).clone();
}

at::Tensor cast_with_weft(const at::Tensor& from, Dtype from_dtype, Dtype to_dtype,
                          double scale = 1) {
  const at::Tensor to = at::empty(from.sizes(), scalar_type(to_dtype));
  const Slice source = slice_of(from);
  const Slice destination = slice_of(to);
  cast({&source, 1}, from_dtype, {&destination, 1}, to_dtype, scale);
  return to;
}

class SixteenBits : public testing::TestWithParam<Dtype> {};

TEST_P(SixteenBits, WidenAsInLibtorch) {
  const at::Tensor patterns = all_16_bit_patterns(scalar_type(GetParam()));
  expect_same(cast_with_weft(patterns, GetParam(), Dtype::Float32), patterns.to(at::kFloat));
  expect_same(cast_with_weft(patterns, GetParam(), Dtype::Float64), patterns.to(at::kDouble));
}

TEST_P(SixteenBits, NarrowAsInLibtorch) {
  const at::Tensor values = all_kinds_of_float();
  expect_same(cast_with_weft(values, Dtype::Float32, GetParam()),
              values.to(scalar_type(GetParam())));
}

TEST_P(SixteenBits, NarrowDoublesViaFloatAsLibtorch) {
  const at::Tensor values = all_kinds_of_float().to(at::kDouble) * (1 + 0x1p-40);
  expect_same(cast_with_weft(values, Dtype::Float64, GetParam()),
              values.to(scalar_type(GetParam())));
}

// The processor's own conversions run over groups of eight. The remainder, and machines without
// these conversions, use integer arithmetic. Both must agree.
TEST_P(SixteenBits, SingleElementsGiveTheSame) {
  const Dtype dtype = GetParam();
  const at::Tensor values = all_kinds_of_float();
  const at::Tensor narrowed = cast_with_weft(values, Dtype::Float32, dtype);
  const auto* value = static_cast<const float*>(values.const_data_ptr());
  const auto* bits = static_cast<const std::uint16_t*>(narrowed.const_data_ptr());
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const std::uint16_t one =
        dtype == Dtype::Float16 ? narrow<Half>(value[i]).bits : narrow<BFloat16>(value[i]).bits;
    const float back = dtype == Dtype::Float16 ? widen(Half{one}) : widen(BFloat16{one});
    if (value[i] != value[i]) {
      ASSERT_TRUE(back != back) << "element " << i;
    } else {
      ASSERT_EQ(one, bits[i]) << "element " << i;
    }
  }
  const at::Tensor patterns = all_16_bit_patterns(scalar_type(dtype));
  const at::Tensor widened = cast_with_weft(patterns, dtype, Dtype::Float32);
  for (std::int64_t i = 0; i < patterns.numel(); ++i) {
    const auto pattern = static_cast<std::uint16_t>(i);
    const float one = dtype == Dtype::Float16 ? widen(Half{pattern}) : widen(BFloat16{pattern});
    const float other = widened.data_ptr<float>()[i];
    ASSERT_TRUE(one != one ? other != other : std::bit_cast<int>(one) == std::bit_cast<int>(other))
        << "pattern " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SixteenBits, testing::Values(Dtype::Float16, Dtype::BFloat16),
                         case_name);

TEST(Cast, ScalesInWiderTypeAndRoundsOnce) {
  const double scale = 1.0 / 3;
  const at::Tensor values = at::randn({1001}, at::kDouble) * 100;
  for (const Dtype from : kFloatTypes) {
    for (const Dtype to : kFloatTypes) {
      const at::Tensor source = values.to(scalar_type(from));
      const bool in_double = from == Dtype::Float64 || to == Dtype::Float64;
      const at::Tensor wide = source.to(in_double ? at::kDouble : at::kFloat);
      SCOPED_TRACE(std::string(name(from)) + " to " + std::string(name(to)));
      expect_same(cast_with_weft(source, from, to, scale), (wide * scale).to(scalar_type(to)));
    }
  }
}

TEST(Cast, ComplexScalesBothParts) {
  const at::Tensor values = at::randn({37}, at::kComplexDouble);
  expect_same(cast_with_weft(values, Dtype::ComplexFloat64, Dtype::ComplexFloat64, 0.25),
              values * 0.25);
  expect_same(cast_with_weft(values, Dtype::ComplexFloat64, Dtype::ComplexFloat32),
              values.to(at::kComplexFloat));
}

TEST(Cast, ToTheSameTypeKeepsTheBytes) {
  for (const Dtype dtype : kAllTypes) {
    SCOPED_TRACE(name(dtype));
    const auto elements = static_cast<std::int64_t>(33 * size_of(dtype));
    const at::Tensor bytes = at::randint(0, 256, {elements}, at::kByte);
    const at::Tensor copy = at::zeros({elements}, at::kByte);
    const Slice from = slice_of(bytes);
    const Slice to = slice_of(copy);
    cast({&from, 1}, dtype, {&to, 1}, dtype);
    expect_same(copy, bytes);
  }
}

TEST(Cast, RefusesMissingConversions) {
  const at::Tensor values = at::zeros({4}, at::kInt);
  const auto refusal = [&](Dtype from, Dtype to, double scale) -> std::string {
    const Slice slice = slice_of(values);
    try {
      cast({&slice, 1}, from, {&slice, 1}, to, scale);
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      return error.text();
    }
    return "";
  };
  EXPECT_THAT(refusal(Dtype::Int32, Dtype::Float32, 1),
              HasSubstr("cast: cannot convert int32 to float32"));
  EXPECT_THAT(refusal(Dtype::Int32, Dtype::Int32, 0.5),
              HasSubstr("int32 to int32 with a scale of 0.5"));
  EXPECT_THAT(refusal(Dtype::ComplexFloat32, Dtype::Float32, 1), HasSubstr("complex64 to float32"));
  EXPECT_THAT(refusal(Dtype::Float8E4M3, Dtype::Float32, 1), HasSubstr("float8_e4m3fn"));
}

TEST(Scale, MultipliesInPlace) {
  const at::Tensor values = at::randn({1003}, at::kFloat);
  const at::Tensor expected = values * 0.125;
  scale(slice_of(values), Dtype::Float32, 0.125);
  expect_same(values, expected);
  scale(slice_of(values), Dtype::Float32, 1);
  expect_same(values, expected);
  const at::Tensor counts = at::arange(4, at::kLong);
  EXPECT_THROW(scale(slice_of(counts), Dtype::Int64, 0.5), Error);
}

}  // namespace
}  // namespace weft::kernels
