// How collectives combine the elements of several ranks, and which element types an operator takes.
#pragma once

#include <cstdint>
#include <string_view>

#include <weft/base/dtype.h>

namespace weft {

// The numbers go on the wire: append, never renumber.
enum class ReduceOp : std::uint8_t {
  Sum = 0,  // of bools: logical or
  Avg = 1,  // Sum, and then a division by the number of ranks, which is the caller's (see
            // kernels/kernels.h)
  Product = 2,
  Min = 3,  // a NaN wins, as in torch.minimum (Gloo's own do not see to that: docs/api-changes.md);
            // of bools: logical and
  Max = 4,
  BitAnd = 5,
  BitOr = 6,
  BitXor = 7,
};

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

// Every operator over integers and bool except Avg (the mean of integers is not an integer;
// libtorch refuses it as well), every operator but the bitwise ones over floating point, Sum, Avg
// and Product over complex, none over float8.
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
