// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/power_sgd_bucket.h>

namespace weft::parallel {

namespace {

constexpr std::int64_t kRows = 1;  // the dimension of rows in a batch of matrices

// Gram-Schmidt on the columns of each matrix. A column of zeros stays one.
void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const std::int64_t columns = matrices.size(2);
  for (std::int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm =
        at::linalg_vector_norm(column, 2, at::OptionalIntArrayRef({kRows}), /*keepdim=*/true);
    if (epsilon == 0) {
      norm = norm.masked_fill(norm == 0, 1);
    } else {
      norm = norm + epsilon;
    }
    column.div_(norm);
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum({kRows}, /*keepdim=*/true) * column);
  }
}

}  // namespace

PowerSgdBucket::PowerSgdBucket(GradBucket& bucket, const PowerSgdOptions& options)
    : options_(options), parameters_(bucket.parameters()), values_(bucket.buffer().options()) {
  divide(bucket);
  if (options_.use_error_feedback) error_ = at::zeros({bucket.buffer().numel()}, values_);
}

bool PowerSgdBucket::fits(const GradBucket& bucket) const {
  const at::Tensor& buffer = bucket.buffer();
  return buffer.scalar_type() == c10::typeMetaToScalarType(values_.dtype()) &&
         buffer.device() == values_.device() &&
         std::ranges::equal(
             parameters_, bucket.parameters(),
             [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); });
}

void PowerSgdBucket::divide(const GradBucket& bucket) {
  std::int64_t offset = 0, of_ps = 0, of_qs = 0;
  for (const at::Tensor& gradient : bucket.gradients()) {
    Matrix matrix;
    matrix.offset = offset;
    offset += gradient.numel();
    matrix.rows = gradient.dim() == 0 ? 1 : gradient.size(0);
    matrix.columns = matrix.rows == 0 ? 0 : gradient.numel() / matrix.rows;
    matrix.rank =
        std::min<std::int64_t>({matrix.rows, matrix.columns, options_.matrix_approximation_rank});
    const std::int64_t sent = (matrix.rows + matrix.columns) * matrix.rank;
    if (static_cast<double>(sent) * options_.min_compression_rate <
        static_cast<double>(gradient.numel())) {
      of_ps += matrix.rows * matrix.rank;
      of_qs += matrix.columns * matrix.rank;
      matrices_.push_back(matrix);
    } else {
      rest_.push_back({matrix.offset, gradient.numel()});
    }
  }
  if (offset != bucket.buffer().numel()) {
    throw Error(Blame::Caller, "power_sgd: the bucket's gradients have " + std::to_string(offset) +
                                   " elements and its buffer has " +
                                   std::to_string(bucket.buffer().numel()));
  }
  if (matrices_.empty()) return;
  p_memory_ = at::empty({of_ps}, values_);
  q_memory_ = at::empty({of_qs}, values_);
  of_ps = of_qs = 0;
  for (Matrix& matrix : matrices_) {
    const std::int64_t p = matrix.rows * matrix.rank, q = matrix.columns * matrix.rank;
    matrix.p = p_memory_.narrow(0, of_ps, p).view({1, matrix.rows, matrix.rank});
    matrix.q = q_memory_.narrow(0, of_qs, q).view({1, matrix.columns, matrix.rank});
    of_ps += p;
    of_qs += q;
  }
}

void PowerSgdBucket::begin(const at::Tensor& buffer, const std::function<std::uint64_t()>& seed) {
  buffer_ = buffer;
  if (options_.use_error_feedback) {
    error_.add_(buffer_);
    buffer_.copy_(error_);
  }
  uncompressed_ = at::Tensor();
  std::vector<at::Tensor> rest;
  for (const Slice& slice : rest_) rest.push_back(buffer_.narrow(0, slice.offset, slice.elements));
  if (!rest.empty()) uncompressed_ = at::cat(rest);

  if (options_.warm_start && has_qs_) {
    for (const Matrix& matrix : matrices_) orthogonalise(matrix.q);
  } else {
    randomise(seed());  // also without matrices, so that all ranks draw alike
  }
  for (Matrix& matrix : matrices_) {
    matrix.gradient = buffer_.narrow(0, matrix.offset, matrix.rows * matrix.columns)
                          .view({1, matrix.rows, matrix.columns});
    at::bmm_out(matrix.p, matrix.gradient, matrix.q);
  }
}

void PowerSgdBucket::randomise(std::uint64_t seed) {
  // Drawn in host memory, in which all ranks draw the same.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (Matrix& matrix : matrices_) {
    matrix.q.copy_(at::randn(matrix.q.sizes(), generator, values_.device(at::kCPU)));
    orthogonalise(matrix.q);
  }
  has_qs_ = true;
  if (options_.warm_start && q_memory_.defined()) drawn_ = q_memory_.clone();
}

// Gram-Schmidt for one and two columns, where it is faster, and for dtypes that have no QR.
void PowerSgdBucket::orthogonalise(const at::Tensor& matrices) const {
  const auto dtype = matrices.scalar_type();
  if (matrices.size(2) <= 2 || dtype == at::kHalf || dtype == at::kBFloat16) {
    gram_schmidt(matrices, options_.orthogonalization_epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

void PowerSgdBucket::compute_qs() {
  for (Matrix& matrix : matrices_) {
    orthogonalise(matrix.p);
    at::bmm_out(matrix.q, matrix.gradient.transpose(1, 2), matrix.p);
  }
}

void PowerSgdBucket::finish(int ranks) {
  if (uncompressed_.defined()) {
    uncompressed_.div_(ranks);
    std::int64_t offset = 0;
    for (const Slice& slice : rest_) {
      buffer_.narrow(0, slice.offset, slice.elements)
          .copy_(uncompressed_.narrow(0, offset, slice.elements));
      offset += slice.elements;
    }
  }
  if (q_memory_.defined()) q_memory_.div_(ranks);
  for (Matrix& matrix : matrices_) at::bmm_out(matrix.gradient, matrix.p, matrix.q.transpose(1, 2));
  // An overflow, which GradScaler provokes from time to time, must not stay in the next passes.
  if (options_.use_error_feedback) error_.sub_(buffer_).nan_to_num_(0, 0, 0);
  if (drawn_.defined())
    q_memory_.copy_(at::where(at::isfinite(q_memory_).all(), q_memory_, drawn_));
  for (Matrix& matrix : matrices_) matrix.gradient = at::Tensor();
  buffer_ = at::Tensor();
}

}  // namespace weft::parallel
