// SPDX-License-Identifier: Apache-2.0
// Numbers of any dtype in the memory of a rank, and the results that collectives should produce
// from them. A rank's i-th number is small, so that sums of a few of them are exact in every dtype
// but the 8-bit floats.
#pragma once

#include <algorithm>
#include <cmath>

#include <weft/kernels/reduce_op.h>
#include <weft/tests/conformance/communicator/ranks.h>
#include <weft/tests/harness/elements.h>

namespace weft::conformance {

inline constexpr Dtype kDtypes[] = {
    Dtype::UInt8,          Dtype::Int8,           Dtype::Int16,   Dtype::Int32,    Dtype::Int64,
    Dtype::Float16,        Dtype::Float32,        Dtype::Float64, Dtype::BFloat16, Dtype::Bool,
    Dtype::ComplexFloat32, Dtype::ComplexFloat64, Dtype::UInt16,  Dtype::UInt32,   Dtype::UInt64,
    Dtype::Float8E4M3,     Dtype::Float8E5M2};
inline constexpr ReduceOp kOps[] = {ReduceOp::Sum,   ReduceOp::Avg,   ReduceOp::Product,
                                    ReduceOp::Min,   ReduceOp::Max,   ReduceOp::BitAnd,
                                    ReduceOp::BitOr, ReduceOp::BitXor};

// The index-th number that a rank starts with; `salt` tells operations apart.
inline double number_of(Dtype dtype, int rank, std::size_t index, int salt = 0) {
  const auto mixed = static_cast<std::size_t>(rank) * 3 + index + static_cast<std::size_t>(salt);
  return dtype == Dtype::Bool ? static_cast<double>(mixed % 2) : static_cast<double>(1 + mixed % 4);
}

// Typed memory of a rank.
class Numbers {
 public:
  Numbers(Rank& rank, Dtype dtype, std::size_t elements)
      : dtype_(dtype), bytes_(elements * size_of(dtype)), memory_(rank.allocate(bytes_.size())) {
    memory_->write(bytes_.data());
  }
  // Filled with the start numbers of rank `whose`.
  Numbers(Rank& rank, Dtype dtype, std::size_t elements, int whose, int salt = 0)
      : Numbers(rank, dtype, elements) {
    fill([&](std::size_t i) { return number_of(dtype, whose, i, salt); });
  }

  template <class Number>
  void fill(const Number& number) {
    for (std::size_t i = 0; i < count(); ++i) harness::store(dtype_, bytes_.data(), i, number(i));
    memory_->write(bytes_.data());
  }
  Slice slice() const { return memory_->slice(); }
  Elements elements() const { return {slice(), dtype_}; }
  Pin pin() const { return memory_; }
  std::size_t count() const { return harness::numbers_in(dtype_, bytes_.size()); }

  std::vector<double> read() {
    memory_->read(bytes_.data());
    std::vector<double> numbers;
    for (std::size_t i = 0; i < count(); ++i)
      numbers.push_back(harness::load(dtype_, bytes_.data(), i));
    return numbers;
  }
  std::vector<std::byte> read_bytes() {
    memory_->read(bytes_.data());
    return bytes_;
  }

 private:
  Dtype dtype_;
  std::vector<std::byte> bytes_;
  std::shared_ptr<Memory> memory_;
};

// The numbers that a rank starts with.
inline std::vector<double> start_of(Dtype dtype, std::size_t elements, int rank, int salt = 0) {
  std::vector<double> numbers;
  const std::size_t count = harness::numbers_in(dtype, elements * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) numbers.push_back(number_of(dtype, rank, i, salt));
  return numbers;
}

inline double reduce(Dtype dtype, ReduceOp op, double a, double b) {
  const auto bits = [&](auto combine) {
    return static_cast<double>(combine(static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)));
  };
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg: return dtype == Dtype::Bool ? std::max(a, b) : a + b;
    case ReduceOp::Product: return a * b;
    case ReduceOp::Min: return std::min(a, b);
    case ReduceOp::Max: return std::max(a, b);
    case ReduceOp::BitAnd: return bits([](auto x, auto y) { return x & y; });
    case ReduceOp::BitOr: return bits([](auto x, auto y) { return x | y; });
    case ReduceOp::BitXor: return bits([](auto x, auto y) { return x ^ y; });
  }
  return 0;
}

// Each pair of numbers is one complex number.
inline void multiply_complex(std::vector<double>& into, const std::vector<double>& with) {
  for (std::size_t i = 0; i < into.size(); i += 2) {
    const double real = into[i] * with[i] - into[i + 1] * with[i + 1];
    into[i + 1] = into[i] * with[i + 1] + into[i + 1] * with[i];
    into[i] = real;
  }
}

// The reduction of all ranks' start numbers.
inline std::vector<double> reduced(Dtype dtype, ReduceOp op, std::size_t elements, int ranks,
                                   int salt = 0) {
  std::vector<double> result = start_of(dtype, elements, 0, salt);
  const bool is_complex = dtype == Dtype::ComplexFloat32 || dtype == Dtype::ComplexFloat64;
  for (int rank = 1; rank < ranks; ++rank) {
    const auto next = start_of(dtype, elements, rank, salt);
    if (is_complex && op == ReduceOp::Product) {
      multiply_complex(result, next);
      continue;
    }
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = reduce(dtype, op, result[i], next[i]);
  }
  if (op == ReduceOp::Avg) {
    for (double& number : result) number /= ranks;
  }
  return result;
}

// The relative error that a reduced number may have.
inline double tolerance_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float8E4M3: return 0.15;
    case Dtype::Float8E5M2: return 0.3;
    case Dtype::BFloat16: return 0.02;
    case Dtype::Float16: return 2e-3;
    case Dtype::Float32:
    case Dtype::ComplexFloat32: return 1e-6;
    case Dtype::Float64:
    case Dtype::ComplexFloat64: return 1e-12;
    default: return 0;
  }
}

inline void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                        double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(actual[i] - expected[i]), tolerance * std::abs(expected[i]))
        << what << ": number " << i << " is " << actual[i] << ", not " << expected[i];
  }
}

}  // namespace weft::conformance
