// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/kernels/kernels.h>
#include <weft/transport/mesh/fold.h>

namespace weft::transport::mesh {

namespace {

Slice slice_of(const std::byte* data, std::size_t bytes) {
  return {const_cast<std::byte*>(data), bytes, Device::host()};
}

void cast(const std::byte* from, Dtype from_dtype, std::byte* to, Dtype to_dtype,
          std::size_t elements, double scale) {
  const Slice source = slice_of(from, elements * size_of(from_dtype));
  const Slice target = slice_of(to, elements * size_of(to_dtype));
  kernels::cast({&source, 1}, from_dtype, {&target, 1}, to_dtype, scale);
}

}  // namespace

Arithmetic arithmetic_of(Dtype dtype, ReduceOp op, int ranks) {
  const bool is_short_float = dtype == Dtype::Float16 || dtype == Dtype::BFloat16;
  const bool rounds = op == ReduceOp::Sum || op == ReduceOp::Product || op == ReduceOp::Avg;
  return {dtype, op, is_short_float && rounds && (ranks > 2 || op == ReduceOp::Avg)};
}

void Fold::add(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch) {
  if (taken_ == place_.own_position) take(place_.own, arithmetic, scratch);
  take(numbers, arithmetic, scratch);
  if (taken_ == place_.own_position) take(place_.own, arithmetic, scratch);
  if (taken_ == place_.others + 1) finish(arithmetic, scratch);
}

void Fold::add_none(const Arithmetic& arithmetic, Scratch& scratch) {
  take(place_.own, arithmetic, scratch);
  finish(arithmetic, scratch);
}

void Fold::take(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch) {
  const bool own_is_in = taken_++ >= place_.own_position;  // or is taken now
  if (place_.bytes == 0) return;
  if (arithmetic.wide) return take_wide(numbers, arithmetic, scratch);
  if (so_far_ == nullptr && (own_is_in || place_.own_position == 1)) {
    so_far_ = numbers;  // valid long enough: used before add() returns, or this rank's own
    return;
  }
  if (!own_is_in && !block_) block_ = scratch.take(place_.bytes);
  if (so_far_ == nullptr) {
    std::memcpy(block_.get(), numbers, place_.bytes);
    so_far_ = block_.get();
    return;
  }
  std::byte* const to = own_is_in ? place_.out : block_.get();
  kernels::reduce(slice_of(to, place_.bytes), slice_of(so_far_, place_.bytes),
                  slice_of(numbers, place_.bytes), arithmetic.dtype, arithmetic.op);
  so_far_ = to;
}

void Fold::take_wide(const std::byte* numbers, const Arithmetic& arithmetic, Scratch& scratch) {
  const Dtype dtype = takes(arithmetic);
  const std::size_t count = elements(arithmetic);
  if (so_far_ == nullptr) {
    std::byte* sum = place_.out;
    if (place_.precision != Precision::Widens) {
      block_ = scratch.take(count * sizeof(float));
      sum = block_.get();
    }
    so_far_ = sum;
    if (dtype == Dtype::Float32) return static_cast<void>(std::memcpy(sum, numbers, place_.bytes));
    return cast(numbers, dtype, sum, Dtype::Float32, count, 1);
  }
  std::byte* const sum = block_ ? block_.get() : place_.out;
  if (dtype == Dtype::Float32) {
    return kernels::reduce(slice_of(sum, place_.bytes), slice_of(numbers, place_.bytes),
                           Dtype::Float32, arithmetic.op);
  }
  constexpr std::size_t kAtOnce = 2048;  // elements; fits the L1 cache
  alignas(64) std::byte widened[kAtOnce * sizeof(float)];
  for (std::size_t done = 0; done < count; done += kAtOnce) {
    const std::size_t some = std::min(kAtOnce, count - done);
    cast(numbers + done * size_of(dtype), dtype, widened, Dtype::Float32, some, 1);
    kernels::reduce(slice_of(sum + done * sizeof(float), some * sizeof(float)),
                    slice_of(widened, some * sizeof(float)), Dtype::Float32, arithmetic.op);
  }
}

void Fold::finish(const Arithmetic& arithmetic, Scratch& scratch) {
  if (place_.bytes == 0) return;
  if (arithmetic.wide) {
    if (!block_) return;  // it widens, into the memory of the result
    const std::size_t count = elements(arithmetic);
    cast(block_.get(), Dtype::Float32, place_.out, arithmetic.dtype, count, place_.scale);
    scratch.give(std::move(block_), count * sizeof(float));
    return;
  }
  if (block_) scratch.give(std::move(block_), place_.bytes);
  if (place_.scale != 1)
    kernels::scale(slice_of(place_.out, place_.bytes), arithmetic.dtype, place_.scale);
}

}  // namespace weft::transport::mesh
