// SPDX-License-Identifier: Apache-2.0
// The reduction of one piece of memory over several ranks. It takes each rank's numbers once, in a
// fixed order, and writes the result after the last. 16-bit floats of several ranks are added in
// fp32 and rounded once: where a collective reduces in two stages, the first gives fp32 and the
// second takes it.
#pragma once

#include <cstdint>

#include <weft/base/dtype.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/mesh/scratch.h>

namespace weft::transport::mesh {

// How a collective combines numbers.
struct Arithmetic {
  Dtype dtype = Dtype::UInt8;
  ReduceOp op = ReduceOp::Sum;
  bool wide = false;  // reduce in fp32
};
// Two 16-bit floats are summed without fp32, as that also rounds once. Averages need fp32, because
// a sum of fp16 may overflow before it is divided.
Arithmetic arithmetic_of(Dtype dtype, ReduceOp op, int ranks);

// Of a reduction in fp32: what it takes and gives.
enum class Precision : std::uint8_t {
  Whole,    // takes and gives the collective's dtype
  Widens,   // gives fp32
  Narrows,  // takes fp32
};

class Fold {
 public:
  struct Operands {
    const std::byte* own = nullptr;  // this rank's numbers
    // May be the same memory as `own`, unless the fold widens. Not written before `own` has been
    // taken.
    std::byte* out = nullptr;
    std::size_t bytes = 0;           // of each rank's numbers
    std::uint32_t others = 1;        // number of add() calls that will come
    std::uint32_t own_position = 0;  // how many of them precede this rank's numbers
    double scale = 1;                // factor of the result: 1 / ranks for an average
    Precision precision = Precision::Whole;
  };
  explicit Fold(const Operands& place) : place_(place) {}

  // Takes the next rank's numbers, which must be aligned for an element. Does not use them after it
  // returns.
  void add(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch);
  // The reduction of this rank's numbers alone, without others: converts them.
  void add_none(const Arithmetic& arithmetic, Scratch& scratch);
  const Operands& place() const { return place_; }
  // The type of the numbers that it takes.
  Dtype takes(const Arithmetic& arithmetic) const {
    const bool is_wide = arithmetic.wide && place_.precision == Precision::Narrows;
    return is_wide ? Dtype::Float32 : arithmetic.dtype;
  }

 private:
  void take(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch);
  void take_wide(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch);
  void finish(const Arithmetic& arithmetic, Scratch& scratch);
  std::size_t elements(const Arithmetic& arithmetic) const {
    return place_.bytes / size_of(takes(arithmetic));
  }

  Operands place_;
  std::uint32_t taken_ = 0;
  const std::byte* so_far_ = nullptr;
  // Partial result, when it may not be written to `out` yet or has another type.
  Scratch::Block block_;
};

}  // namespace weft::transport::mesh
