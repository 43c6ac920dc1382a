// SPDX-License-Identifier: Apache-2.0
// What power_sgd remembers of one bucket from pass to pass, and the arithmetic between its
// collectives. Internal. Used by one thread at a time. All memory that collectives and other
// streams use stays until the next pass.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/ddp/comm_hooks.h>
#include <weft/engine/ddp/power_sgd.h>

namespace weft::parallel {

class PowerSgdBucket {
 public:
  // `bucket`: one of real floating-point values. Throws Caller if its gradients do not fill it.
  PowerSgdBucket(GradBucket& bucket, const PowerSgdOptions& options);

  // True if the bucket still has the parameters, dtype and device that this was made for.
  bool fits(const GradBucket& bucket) const;

  // The steps of one pass, in this order; the caller sums what is named between them over the
  // ranks. `seed` is called if random matrices are needed, on all ranks alike.
  void begin(const at::Tensor& buffer, const std::function<std::uint64_t()>& seed);
  // … sum uncompressed() and ps() …
  void compute_qs();
  // … sum qs() …
  // Leaves the averages in the buffer.
  void finish(int ranks);

  // Undefined if the bucket has no such gradients.
  const at::Tensor& uncompressed() const { return uncompressed_; }
  const at::Tensor& ps() const { return p_memory_; }
  const at::Tensor& qs() const { return q_memory_; }

 private:
  struct Matrix {
    std::int64_t offset = 0, rows = 0, columns = 0, rank = 0;  // of the gradient, in the buffer
    at::Tensor gradient, p, q;                                 // batches of one matrix
  };
  struct Slice {
    std::int64_t offset = 0, elements = 0;
  };
  void divide(const GradBucket& bucket);
  void randomise(std::uint64_t seed);
  void orthogonalise(const at::Tensor& matrices) const;

  const PowerSgdOptions options_;
  const std::vector<at::Tensor> parameters_;
  const at::TensorOptions values_;
  std::vector<Matrix> matrices_;
  std::vector<Slice> rest_;
  at::Tensor buffer_;  // of this pass
  at::Tensor error_;   // what the passes before have lost; during a pass, what it should send
  at::Tensor p_memory_, q_memory_, uncompressed_;
  at::Tensor drawn_;  // random qs, which take the place of those that an overflow has spoilt
  bool has_qs_ = false;
};

}  // namespace weft::parallel
