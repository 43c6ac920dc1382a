// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <weft/base/error.h>
#include <weft/kernels/kernels.h>

#include "tensors.h"

namespace weft::kernels {
namespace {

constexpr ReduceOp kAllOps[] = {ReduceOp::Sum,   ReduceOp::Avg,   ReduceOp::Product,
                                ReduceOp::Min,   ReduceOp::Max,   ReduceOp::BitAnd,
                                ReduceOp::BitOr, ReduceOp::BitXor};

// Random bytes for integers (so that sums and products wrap around), random values for the others.
at::Tensor random_values(Dtype dtype, std::int64_t elements) {
  const at::ScalarType type = scalar_type(dtype);
  if (dtype == Dtype::Bool) return at::randint(0, 2, {elements}, at::kByte).to(at::kBool);
  if (at::isComplexType(type)) return at::randn({elements}, at::kComplexDouble).to(type);
  if (at::isFloatingType(type)) return at::randn({elements}, at::kDouble).to(type);
  return at::randint(0, 256, {elements * static_cast<std::int64_t>(size_of(dtype))}, at::kByte)
      .view(type);
}

// libtorch lacks arithmetic on uint16 to uint64, but defines it through that of the signed types:
// the bits of sums and products are the same, and flipping the highest bit maps the unsigned order
// to the signed one.
at::ScalarType signed_type(at::ScalarType type) {
  if (type == at::kUInt16) return at::kShort;
  if (type == at::kUInt32) return at::kInt;
  return type == at::kUInt64 ? at::kLong : type;
}

at::Tensor libtorch_result(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const at::ScalarType type = a.scalar_type();
  if (signed_type(type) != type) {
    const bool ordered = op == ReduceOp::Min || op == ReduceOp::Max;
    const std::int64_t highest =
        ordered ? std::numeric_limits<std::int64_t>::min() >> (64 - 8 * a.element_size()) : 0;
    const at::Tensor flipped_a = at::bitwise_xor(a.view(signed_type(type)), highest);
    const at::Tensor flipped_b = at::bitwise_xor(b.view(signed_type(type)), highest);
    return at::bitwise_xor(libtorch_result(flipped_a, flipped_b, op), highest).view(type);
  }
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg: return a + b;
    case ReduceOp::Product: return a * b;
    case ReduceOp::Min: return at::minimum(a, b);
    case ReduceOp::Max: return at::maximum(a, b);
    case ReduceOp::BitAnd: return at::bitwise_and(a, b);
    case ReduceOp::BitOr: return at::bitwise_or(a, b);
    case ReduceOp::BitXor: return at::bitwise_xor(a, b);
  }
  return {};
}

class Reduce : public testing::TestWithParam<ReduceOp> {
 protected:
  static void check(ReduceOp op, Dtype dtype, std::int64_t elements);
};

void Reduce::check(ReduceOp op, Dtype dtype, std::int64_t elements) {
  const at::Tensor a = random_values(dtype, elements);
  const at::Tensor b = random_values(dtype, elements);
  const at::Tensor out = at::empty_like(a);
  if (!supports(op, dtype)) {
    EXPECT_THROW(reduce(slice_of(out), slice_of(a), slice_of(b), dtype, op), Error);
    return;
  }
  reduce(slice_of(out), slice_of(a), slice_of(b), dtype, op);
  const at::Tensor expected = libtorch_result(a, b, op);
  if (op == ReduceOp::Product &&
      out.is_complex()) {  // libtorch fuses multiplications and additions here
    EXPECT_TRUE(out.allclose(expected, 1e-5, 1e-6));
  } else {
    expect_same(out, expected);
  }
  const at::Tensor into = a.clone();
  reduce(slice_of(into), slice_of(b), dtype, op);
  expect_same(into, out);
}

TEST_P(Reduce, EqualsLibtorchOrIsRefused) {
  for (const Dtype dtype : kAllTypes) {
    SCOPED_TRACE(name(dtype));
    for (const std::int64_t elements : {0, 1, 7, 8, 64, 1000, 4099})
      check(GetParam(), dtype, elements);
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Reduce, testing::ValuesIn(kAllOps), case_name);

TEST(ReduceOrder, NanWinsOnEitherSide) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<at::Tensor> columns;
  for (const double a : {nan, 1.0, -infinity, infinity}) {
    for (const double b : {nan, 2.0, -infinity, infinity}) {
      columns.push_back(at::zeros({1, 2}, at::kDouble));
      columns.back().data_ptr<double>()[0] = a;
      columns.back().data_ptr<double>()[1] = b;
    }
  }
  const at::Tensor pairs = at::cat(columns);
  for (const Dtype dtype : kFloatTypes) {
    const at::Tensor a = pairs.select(1, 0).to(scalar_type(dtype)).contiguous();
    const at::Tensor b = pairs.select(1, 1).to(scalar_type(dtype)).contiguous();
    for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product}) {
      const at::Tensor out = at::empty_like(a);
      reduce(slice_of(out), slice_of(a), slice_of(b), dtype, op);
      SCOPED_TRACE(std::string(name(op)) + " of " + std::string(name(dtype)));
      expect_same(out, libtorch_result(a, b, op));
    }
  }
}

TEST(ReduceHalf, AddsInFp32AndRoundsOnce) {
  const at::Tensor a = at::zeros({9}, at::kHalf).fill_(2048);
  const at::Tensor b = at::zeros({9}, at::kHalf).fill_(1.5);
  reduce(slice_of(a), slice_of(b), Dtype::Float16, ReduceOp::Sum);
  EXPECT_EQ(a[0].item<float>(), 2050);  // 2049.5 to the nearest even
  EXPECT_EQ(a[8].item<float>(), 2050);
}

TEST(ReduceUnaligned, WorksAtEveryOffset) {
  const at::Tensor a = at::randn({100}, at::kFloat);
  const at::Tensor b = at::randn({100}, at::kFloat);
  for (std::int64_t skipped = 0; skipped < 8; ++skipped) {
    const at::Tensor out = at::zeros({100}, at::kFloat);
    const auto bytes = static_cast<std::size_t>(skipped) * sizeof(float);
    reduce(slice_of(out).part(4, 91 * 4), slice_of(a).part(bytes, 91 * 4),
           slice_of(b).part(8, 91 * 4), Dtype::Float32, ReduceOp::Sum);
    expect_same(out.slice(0, 1, 92), a.slice(0, skipped, skipped + 91) + b.slice(0, 2, 93));
    EXPECT_EQ(out[0].item<float>(), 0);
    EXPECT_EQ(out[92].item<float>(), 0);
  }
}

TEST(ReduceRefuses, OperandsOfDifferentSizes) {
  const at::Tensor a = at::randn({4}, at::kFloat);
  const at::Tensor b = at::randn({5}, at::kFloat);
  try {
    reduce(slice_of(a), slice_of(b), Dtype::Float32, ReduceOp::Sum);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(
        error.text(),
        testing::HasSubstr("reduce: the second operand has 5 elements of float32; 4 are needed"));
  }
}

TEST(ReduceOpName, IsTheEnumerator) {
  for (const ReduceOp op : kAllOps) EXPECT_NE(name(op), "unknown");
  EXPECT_EQ(name(ReduceOp::BitXor), "BitXor");
}

}  // namespace
}  // namespace weft::kernels
