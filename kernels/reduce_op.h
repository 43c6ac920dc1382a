// SPDX-License-Identifier: Apache-2.0
// How collectives combine the elements of several ranks, and which element types an operator
// supports.
#pragma once

#include <cstdint>
#include <string_view>

#include <weft/base/dtype.h>

namespace weft {

// The numbers go on the wire: append, never renumber.
enum class ReduceOp : std::uint8_t {
  Sum = 0,  // of bools: logical or
  // Sum, then a division by the number of ranks, which the caller does (kernels/kernels.h).
  Avg = 1,
  Product = 2,  // the product of all elements
  // A NaN wins, as in torch.minimum (not in Gloo's own reductions:
  // docs/differences-from-pytorch.md). Of bools: logical and.
  Min = 3,
  Max = 4,     // like Min; of bools: logical or
  BitAnd = 5,  // bit by bit, of integers and bools
  BitOr = 6,   // bit by bit, of integers and bools
  BitXor = 7,  // bit by bit, of integers and bools
};

// Returns the name of the enumerator: "Sum".
constexpr std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum: return "Sum";
    case ReduceOp::Avg: return "Avg";
    case ReduceOp::Product: return "Product";
    case ReduceOp::Min: return "Min";
    case ReduceOp::Max: return "Max";
    case ReduceOp::BitAnd: return "BitAnd";
    case ReduceOp::BitOr: return "BitOr";
    case ReduceOp::BitXor: return "BitXor";
  }
  return "unknown";
}

namespace kernels {

// True if the operator supports the type. Integers and bool: every operator except Avg (the mean of
// integers is not an integer; libtorch refuses it too). Floating point: every operator except the
// bitwise ones. Complex: Sum, Avg and Product. float8: none.
constexpr bool supports(ReduceOp op, Dtype dtype) {
  switch (dtype) {
    case Dtype::Float8E4M3:
    case Dtype::Float8E5M2: return false;
    case Dtype::ComplexFloat32:
    case Dtype::ComplexFloat64:
      return op == ReduceOp::Sum || op == ReduceOp::Avg || op == ReduceOp::Product;
    case Dtype::Float16:
    case Dtype::BFloat16:
    case Dtype::Float32:
    case Dtype::Float64:
      return op != ReduceOp::BitAnd && op != ReduceOp::BitOr && op != ReduceOp::BitXor;
    default: return op != ReduceOp::Avg;
  }
}

}  // namespace kernels
}  // namespace weft
