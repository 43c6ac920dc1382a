// The element-wise operators that collectives reduce with.
#pragma once

#include <cstdint>
#include <string_view>

namespace weft {

// The numbers go on the wire: append, never renumber. Avg is Sum divided by the number of ranks.
enum class ReduceOp : std::uint8_t { Sum, Avg, Product, Min, Max, BitAnd, BitOr, BitXor };

constexpr std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum: return "sum";
    case ReduceOp::Avg: return "avg";
    case ReduceOp::Product: return "product";
    case ReduceOp::Min: return "min";
    case ReduceOp::Max: return "max";
    case ReduceOp::BitAnd: return "bit_and";
    case ReduceOp::BitOr: return "bit_or";
    case ReduceOp::BitXor: return "bit_xor";
  }
  return "unknown";
}

}  // namespace weft
