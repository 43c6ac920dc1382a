// SPDX-License-Identifier: Apache-2.0
// Slices of libtorch tensors, and comparisons between tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>

namespace weft::kernels {

// libtorch computes on the test's own thread: the thread sanitizer cannot see how its workers
// synchronise.
inline const bool kOnOneThread = (at::set_num_threads(1), true);

inline at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::UInt8: return at::kByte;
    case Dtype::Int8: return at::kChar;
    case Dtype::Int16: return at::kShort;
    case Dtype::Int32: return at::kInt;
    case Dtype::Int64: return at::kLong;
    case Dtype::Float16: return at::kHalf;
    case Dtype::Float32: return at::kFloat;
    case Dtype::Float64: return at::kDouble;
    case Dtype::ComplexFloat32: return at::kComplexFloat;
    case Dtype::ComplexFloat64: return at::kComplexDouble;
    case Dtype::Bool: return at::kBool;
    case Dtype::BFloat16: return at::kBFloat16;
    case Dtype::Float8E4M3: return at::kFloat8_e4m3fn;
    case Dtype::Float8E5M2: return at::kFloat8_e5m2;
    case Dtype::UInt16: return at::kUInt16;
    case Dtype::UInt32: return at::kUInt32;
    case Dtype::UInt64: return at::kUInt64;
  }
  return at::kByte;
}

constexpr Dtype kFloatTypes[] = {Dtype::Float16, Dtype::BFloat16, Dtype::Float32, Dtype::Float64};
constexpr Dtype kAllTypes[] = {Dtype::UInt8,          Dtype::Int8,       Dtype::Int16,
                               Dtype::Int32,          Dtype::Int64,      Dtype::Float16,
                               Dtype::Float32,        Dtype::Float64,    Dtype::ComplexFloat32,
                               Dtype::ComplexFloat64, Dtype::Bool,       Dtype::BFloat16,
                               Dtype::Float8E4M3,     Dtype::Float8E5M2, Dtype::UInt16,
                               Dtype::UInt32,         Dtype::UInt64};

// Names parameterised tests after their parameter.
constexpr auto case_name = [](const auto& chosen) { return std::string(name(chosen.param)); };

// The tensor must be contiguous and outlive the slice.
inline Slice slice_of(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.nbytes(), Device::host()};
}

inline std::vector<Slice> slices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Slice> slices;
  for (const at::Tensor& tensor : tensors) slices.push_back(slice_of(tensor));
  return slices;
}

// Equal bit for bit, except that any NaN equals any NaN.
template <class Bits>
void expect_same_bits(const at::Tensor& actual, const at::Tensor& expected) {
  const auto* a = static_cast<const Bits*>(actual.const_data_ptr());
  const auto* e = static_cast<const Bits*>(expected.const_data_ptr());
  const at::Tensor actual_nan = actual.isnan();
  const at::Tensor expected_nan = expected.isnan();
  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    const bool both_nan = actual_nan.data_ptr<bool>()[i] && expected_nan.data_ptr<bool>()[i];
    ASSERT_TRUE(both_nan || a[i] == e[i])
        << "element " << i << ": " << std::hex << +a[i] << " and not " << +e[i];
  }
}

inline void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type());
  ASSERT_EQ(actual.numel(), expected.numel());
  const at::Tensor a = actual.is_complex() ? at::view_as_real(actual) : actual;
  const at::Tensor e = expected.is_complex() ? at::view_as_real(expected) : expected;
  if (!at::isFloatingType(a.scalar_type()) || at::isFloat8Type(a.scalar_type())) {
    const auto* bytes = static_cast<const std::byte*>(a.const_data_ptr());
    ASSERT_TRUE(
        std::equal(bytes, bytes + a.nbytes(), static_cast<const std::byte*>(e.const_data_ptr())));
    return;
  }
  switch (a.element_size()) {
    case 2: return expect_same_bits<std::uint16_t>(a, e);
    case 4: return expect_same_bits<std::uint32_t>(a, e);
    default: return expect_same_bits<std::uint64_t>(a, e);
  }
}

}  // namespace weft::kernels
