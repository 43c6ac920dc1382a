// SPDX-License-Identifier: Apache-2.0
// The argument checks of both implementations. On a GPU a wrong address ends the whole context, so
// this refuses every mistake that can be seen beforehand, as a Caller error that names the call and
// the slice.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>
#include <weft/kernels/optimizer.h>
#include <weft/kernels/reduce_op.h>

namespace weft::kernels {

// Returns the type of a complex type's parts; any other type itself.
constexpr Dtype real_of(Dtype dtype) {
  if (dtype == Dtype::ComplexFloat32) return Dtype::Float32;
  return dtype == Dtype::ComplexFloat64 ? Dtype::Float64 : dtype;
}

// The pair of types with which a cast runs: complex elements as twice as many real ones; complex128
// that is only copied as twice as many 8-byte words.
struct CastTypes {
  Dtype from, to;
  std::size_t from_bytes, to_bytes;  // of one element
  bool is_copy;
};

// The call whose arguments are checked.
struct Call {
  const char* name;
  Device device;  // the device that every slice must be on

  CastTypes cast_types(Dtype from, Dtype to, double scale) const;
  void check_pairs(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to,
                   Dtype to_dtype) const;
  void check_flat(std::span<const Slice> scattered, Dtype dtype, const Slice& flat,
                  Dtype flat_dtype) const;
  void check_reduce(const Slice& out, const Slice& a, const Slice& b, Dtype dtype,
                    ReduceOp op) const;
  void check_sgd(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                 const SgdOptions& options) const;
  void check_adamw(std::span<const AdamWTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                   const AdamWOptions& options) const;

 private:
  // Checks device, alignment and size; returns the number of elements. `index` < 0: the slice has
  // no number.
  std::size_t elements_of(const Slice& slice, Dtype dtype, const char* what,
                          std::ptrdiff_t index = -1) const;
  void check_elements(std::size_t expected, const Slice& slice, Dtype dtype, const char* what,
                      std::ptrdiff_t index) const;
  void check_optimizer_types(Dtype dtype, Dtype gradient_dtype) const;
  [[noreturn]] void refuse(const std::string& text) const;
};

}  // namespace weft::kernels
