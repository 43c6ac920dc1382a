// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <initializer_list>

#include <weft/kernels/host_loop.h>
#include <weft/kernels/kernels.h>
#include <weft/kernels/operations.h>

namespace weft::kernels {

namespace {

// Runs each tensor immediately, on the calling thread.
struct HostExecutor {
  template <class Operation>
  struct Batch {
    Operation operation;
    void add(std::size_t elements, std::initializer_list<void*> arrays) const {
      if (elements != 0) run_on_host(operation, elements, arrays.begin());
    }
    void launch() const {}
  };
  template <class T>
  struct Batch<Copy<T>> {
    Copy<T> operation;
    void add(std::size_t elements, std::initializer_list<void*> arrays) const {
      if (elements != 0) std::memmove(arrays.begin()[1], arrays.begin()[0], elements * sizeof(T));
    }
    void launch() const {}
  };

  static Device device() { return Device::host(); }
  struct Nothing {};
  static Nothing launches(const trace::Name&, std::size_t) { return {}; }
  template <class Operation>
  Batch<Operation> batch(const Operation& operation) const {
    return {operation};
  }
};

}  // namespace

void cast(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype,
          double scale) {
  cast(HostExecutor(), from, from_dtype, to, to_dtype, scale);
}

void pack(std::span<const Slice> from, Dtype from_dtype, Slice to, Dtype to_dtype, double scale) {
  pack(HostExecutor(), from, from_dtype, to, to_dtype, scale);
}

void unpack(Slice from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype, double scale) {
  unpack(HostExecutor(), from, from_dtype, to, to_dtype, scale);
}

void scale(Slice slice, Dtype dtype, double factor) { scale(HostExecutor(), slice, dtype, factor); }

void reduce(Slice out, Slice a, Slice b, Dtype dtype, ReduceOp op) {
  reduce(HostExecutor(), out, a, b, dtype, op);
}

void reduce(Slice into, Slice with, Dtype dtype, ReduceOp op) {
  reduce(into, into, with, dtype, op);
}

void sgd_step(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
              const SgdOptions& options) {
  sgd_step(HostExecutor(), tensors, dtype, gradient_dtype, options);
}

void adamw_step(std::span<const AdamWTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                const AdamWOptions& options) {
  adamw_step(HostExecutor(), tensors, dtype, gradient_dtype, options);
}

}  // namespace weft::kernels
