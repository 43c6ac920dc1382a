// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <numeric>

#include <weft/tests/kernels/cuda_kernels_claims.h>

namespace weft::kernels {

namespace {

constexpr Dtype kFloatTypes[] = {Dtype::Float16, Dtype::BFloat16, Dtype::Float32, Dtype::Float64};
constexpr Dtype kAllTypes[] = {Dtype::UInt8,          Dtype::Int8,       Dtype::Int16,
                               Dtype::Int32,          Dtype::Int64,      Dtype::Float16,
                               Dtype::Float32,        Dtype::Float64,    Dtype::ComplexFloat32,
                               Dtype::ComplexFloat64, Dtype::Bool,       Dtype::BFloat16,
                               Dtype::Float8E4M3,     Dtype::Float8E5M2, Dtype::UInt16,
                               Dtype::UInt32,         Dtype::UInt64};
constexpr ReduceOp kAllOps[] = {ReduceOp::Sum,   ReduceOp::Avg,   ReduceOp::Product,
                                ReduceOp::Min,   ReduceOp::Max,   ReduceOp::BitAnd,
                                ReduceOp::BitOr, ReduceOp::BitXor};

constexpr std::pair<Dtype, Dtype> kOptimizerTypes[] = {
    {Dtype::Float16, Dtype::Float16}, {Dtype::BFloat16, Dtype::BFloat16},
    {Dtype::Float32, Dtype::Float32}, {Dtype::Float64, Dtype::Float64},
    {Dtype::Float32, Dtype::Float16}, {Dtype::Float32, Dtype::BFloat16}};

// Returns sizes around every boundary (none, one element, a vector, a chunk, several chunks),
// followed by small ones.
std::vector<std::size_t> sizes(std::size_t tensors) {
  std::vector<std::size_t> result = {0, 1, 3, 4, 8, 255, 1024, 4096, 4097, 16384, 20001};
  for (std::size_t i = 0; result.size() < tensors; ++i)
    result.push_back(i % 7 == 0 ? 0 : 1 + i * 37 % 200);
  result.resize(tensors);
  return result;
}

std::size_t sum(const std::vector<std::size_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::size_t{0});
}

}  // namespace

void CudaKernelsClaims::check_pack(Dtype from, Dtype to, double scale,
                                   const std::vector<std::size_t>& elements, std::size_t skew) {
  const auto tensors = add(from, elements, skew);
  const Part flat = add(to, {sum(elements)}, 3 * skew)[0];
  const auto back = add(from, elements, 2 * skew);
  upload();
  pack(on_host(tensors), from, on_host(flat), to, scale);
  kernels_->pack(on_device(tensors), from, on_device(flat), to, scale, *stream_);
  unpack(on_host(flat), to, on_host(back), from, 1);
  kernels_->unpack(on_device(flat), to, on_device(back), from, 1, *stream_);
  SCOPED_TRACE(std::string(name(from)) + " to " + std::string(name(to)) + ", " +
               std::to_string(skew) + " elements off");
  expect_equal();
}

TEST_P(CudaKernelsClaims, PackAndUnpackGiveTheSameBits) {
  for (const Dtype from : kFloatTypes) {
    for (const Dtype to : kFloatTypes) {
      for (const std::size_t skew : {0, 1}) check_pack(from, to, 1.0 / 3, sizes(25), skew);
    }
  }
}

TEST_P(CudaKernelsClaims, PackCopiesAnyTypeToItself) {
  for (const Dtype dtype : kAllTypes) {
    for (const std::size_t skew : {0, 1}) check_pack(dtype, dtype, 1, sizes(15), skew);
  }
}

TEST_P(CudaKernelsClaims, PackTakesThousandsOfTensors) {
  check_pack(Dtype::Float32, Dtype::BFloat16, 0.5, sizes(5000), 0);
  check_pack(Dtype::Float32, Dtype::Float32, 1, std::vector<std::size_t>(3000, 1), 1);
}

TEST_P(CudaKernelsClaims, CastAndScaleGiveTheSameBits) {
  const auto from = add(Dtype::ComplexFloat64, sizes(12), 1);
  const auto to = add(Dtype::ComplexFloat32, sizes(12));
  const Part values = add(Dtype::BFloat16, {5001})[0];
  upload();
  cast(on_host(from), Dtype::ComplexFloat64, on_host(to), Dtype::ComplexFloat32, 3);
  kernels_->cast(on_device(from), Dtype::ComplexFloat64, on_device(to), Dtype::ComplexFloat32, 3,
                 *stream_);
  scale(on_host(values), Dtype::BFloat16, 0.3);
  kernels_->scale(on_device(values), Dtype::BFloat16, 0.3, *stream_);
  expect_equal();
}

void CudaKernelsClaims::check_reduce(ReduceOp op, Dtype dtype, std::size_t elements,
                                     std::size_t skew) {
  const Part a = add(dtype, {elements}, skew)[0];
  const Part b = add(dtype, {elements})[0];
  const Part out = add(dtype, {elements}, 2 * skew)[0];
  upload();
  reduce(on_host(out), on_host(a), on_host(b), dtype, op);
  kernels_->reduce(on_device(out), on_device(a), on_device(b), dtype, op, *stream_);
  reduce(on_host(a), on_host(b), dtype, op);
  kernels_->reduce(on_device(a), on_device(b), dtype, op, *stream_);
  SCOPED_TRACE(std::string(name(op)) + " of " + std::to_string(elements) + " " +
               std::string(name(dtype)));
  expect_equal();
}

TEST_P(CudaKernelsClaims, ReduceGivesTheSameBits) {
  for (const ReduceOp op : kAllOps) {
    for (const Dtype dtype : kAllTypes) {
      if (!supports(op, dtype)) continue;
      for (const std::size_t elements : {0, 1, 7, 4096, 9001})
        check_reduce(op, dtype, elements, elements % 2);
    }
  }
}

TEST_P(CudaKernelsClaims, NanWinsOnEitherSide) {
  for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
    for (const Dtype dtype : kFloatTypes) {
      const Part a = add(dtype, {1000})[0];
      const Part b = add(dtype, {1000})[0];
      const std::vector<double> nans(30, std::numeric_limits<double>::quiet_NaN());
      const Slice from{const_cast<double*>(nans.data()), nans.size() * sizeof(double),
                       Device::host()};
      const Slice in_a = on_host(a).part(100 * size_of(dtype), nans.size() * size_of(dtype));
      const Slice in_b =
          on_host(b).part(115 * size_of(dtype), nans.size() * size_of(dtype));  // some are in both
      cast({&from, 1}, Dtype::Float64, {&in_a, 1}, dtype);
      cast({&from, 1}, Dtype::Float64, {&in_b, 1}, dtype);
      upload();
      reduce(on_host(a), on_host(b), dtype, op);
      kernels_->reduce(on_device(a), on_device(b), dtype, op, *stream_);
      SCOPED_TRACE(std::string(name(op)) + " of " + std::string(name(dtype)));
      expect_equal();
    }
  }
}

void CudaKernelsClaims::check_sgd(Dtype dtype, Dtype gradient_dtype, const SgdOptions& options) {
  const auto parameters = add(dtype, sizes(40));
  const auto gradients = add(gradient_dtype, sizes(40), 1);
  const auto buffers = add(dtype, sizes(40));
  upload();
  std::vector<SgdTensor> here;
  std::vector<SgdTensor> there;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool first = i % 3 == 0;
    here.push_back({on_host(parameters[i]), on_host(gradients[i]), on_host(buffers[i]), first});
    there.push_back(
        {on_device(parameters[i]), on_device(gradients[i]), on_device(buffers[i]), first});
  }
  sgd_step(here, dtype, gradient_dtype, options);
  kernels_->sgd_step(there, dtype, gradient_dtype, options, *stream_);
  SCOPED_TRACE(std::string(name(dtype)) + " from " + std::string(name(gradient_dtype)));
  expect_equal();
}

TEST_P(CudaKernelsClaims, SgdGivesTheSameBits) {
  for (const auto& [dtype, gradient_dtype] : kOptimizerTypes) {
    check_sgd(dtype, gradient_dtype, {.lr = 0.1, .weight_decay = 0.01, .maximize = true});
    check_sgd(dtype, gradient_dtype, {.lr = 0.1, .momentum = 0.9, .dampening = 0.1});
    check_sgd(dtype, gradient_dtype,
              {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
  }
}

void CudaKernelsClaims::check_adamw(Dtype dtype, Dtype gradient_dtype,
                                    const AdamWOptions& options) {
  const auto parameters = add(dtype, sizes(40));
  const auto gradients = add(gradient_dtype, sizes(40));
  const auto exp_avg = add(dtype, sizes(40), 1);
  // Bytes of 0 or 1 give no negative value in any type, and these values must not be negative.
  const auto exp_avg_sq =
      add(Dtype::Bool, std::vector<std::size_t>(1, sum(sizes(40)) * size_of(dtype)))[0];
  const auto max_exp_avg_sq =
      add(Dtype::Bool, std::vector<std::size_t>(1, sum(sizes(40)) * size_of(dtype)))[0];
  upload();
  std::vector<AdamWTensor> here;
  std::vector<AdamWTensor> there;
  std::size_t offset = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Part second{exp_avg_sq.offset + offset, parameters[i].bytes};
    const Part largest{max_exp_avg_sq.offset + offset, parameters[i].bytes};
    offset += parameters[i].bytes;
    const auto step = static_cast<std::int64_t>(1 + i % 3 * 5);
    here.push_back({on_host(parameters[i]), on_host(gradients[i]), on_host(exp_avg[i]),
                    on_host(second), on_host(largest), step});
    there.push_back({on_device(parameters[i]), on_device(gradients[i]), on_device(exp_avg[i]),
                     on_device(second), on_device(largest), step});
  }
  adamw_step(here, dtype, gradient_dtype, options);
  kernels_->adamw_step(there, dtype, gradient_dtype, options, *stream_);
  SCOPED_TRACE(std::string(name(dtype)) + " from " + std::string(name(gradient_dtype)));
  expect_equal();
}

TEST_P(CudaKernelsClaims, AdamWGivesTheSameBits) {
  for (const auto& [dtype, gradient_dtype] : kOptimizerTypes) {
    check_adamw(dtype, gradient_dtype, {.lr = 0.01});
    check_adamw(dtype, gradient_dtype,
                {.lr = 0.01, .weight_decay = 0.1, .amsgrad = true, .maximize = true});
    check_adamw(dtype, gradient_dtype,
                {.lr = 0.01, .weight_decay = 0.1, .decoupled_weight_decay = false});
  }
}

}  // namespace weft::kernels
