// The reduction of one piece of memory over several ranks: takes the ranks' numbers in a fixed
// order, each once, and writes the result when the last one is in. 16-bit floats of several ranks
// add up in fp32 and are rounded once.
#pragma once

#include <cstdint>

#include <weft/base/dtype.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/mesh/scratch.h>

namespace weft::transport::mesh {

// How the numbers of one collective are combined.
struct Arithmetic {
  Dtype dtype = Dtype::UInt8;
  ReduceOp op = ReduceOp::Sum;
  bool wide = false;  // in fp32
};
// Two numbers of 16 bit can be added with one rounding as they are; an average of fp16 overflows
// before it is divided.
Arithmetic arithmetic_of(Dtype dtype, ReduceOp op, int ranks);

class Fold {
 public:
  struct Place {
    const std::byte* own = nullptr;  // this rank's numbers
    std::byte* out = nullptr;  // may be the same memory; written from when `own` has been taken on
    std::size_t bytes = 0;
    std::uint32_t others = 1;        // ranks whose numbers add() will bring
    std::uint32_t own_position = 0;  // how many of them come before this rank's
    double scale = 1;                // of the result: 1 / ranks for an average
  };
  explicit Fold(const Place& place) : place_(place) {}

  // The next rank's numbers, aligned for an element. They are not needed any more afterwards.
  void add(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch);
  const Place& place() const { return place_; }

 private:
  void take(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch);
  void take_wide(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch);
  void finish(const Arithmetic& arithmetic, Scratch& scratch);
  std::size_t wide_bytes(const Arithmetic& arithmetic) const;

  Place place_;
  std::uint32_t taken_ = 0;
  const std::byte* so_far_ = nullptr;
  Scratch::Block block_;  // of what is so far, where it may not go to `out` yet or has another type
};

}  // namespace weft::transport::mesh
