// SPDX-License-Identifier: Apache-2.0
// Every CUDA kernel: its name without the prefix weft_, and its operation. The .cu files define the
// kernels from these lists, CudaKernels loads and launches them by these names, and tests run them
// on the host.
//
// Kernels of the first two lists come in two sizes: name (few segments, a small parameter) and
// name_many.
#pragma once

#include <weft/kernels/elements.h>
#include <weft/kernels/optimizer_elements.h>

#define WEFT_CAST_KERNELS(X)                          \
  X(copy_1, Copy<std::uint8_t>)                       \
  X(copy_2, Copy<std::uint16_t>)                      \
  X(copy_4, Copy<std::uint32_t>)                      \
  X(copy_8, Copy<std::uint64_t>)                      \
  X(cast_float16_float16, Cast<Half, Half>)           \
  X(cast_float16_bfloat16, Cast<Half, BFloat16>)      \
  X(cast_float16_float32, Cast<Half, float>)          \
  X(cast_float16_float64, Cast<Half, double>)         \
  X(cast_bfloat16_float16, Cast<BFloat16, Half>)      \
  X(cast_bfloat16_bfloat16, Cast<BFloat16, BFloat16>) \
  X(cast_bfloat16_float32, Cast<BFloat16, float>)     \
  X(cast_bfloat16_float64, Cast<BFloat16, double>)    \
  X(cast_float32_float16, Cast<float, Half>)          \
  X(cast_float32_bfloat16, Cast<float, BFloat16>)     \
  X(cast_float32_float32, Cast<float, float>)         \
  X(cast_float32_float64, Cast<float, double>)        \
  X(cast_float64_float16, Cast<double, Half>)         \
  X(cast_float64_bfloat16, Cast<double, BFloat16>)    \
  X(cast_float64_float32, Cast<double, float>)        \
  X(cast_float64_float64, Cast<double, double>)

#define WEFT_OPTIMIZER_KERNELS_OF(X, operation, name)    \
  X(name##_float16, operation<Half, Half>)               \
  X(name##_bfloat16, operation<BFloat16, BFloat16>)      \
  X(name##_float32, operation<float, float>)             \
  X(name##_float64, operation<double, double>)           \
  X(name##_float32_from_float16, operation<float, Half>) \
  X(name##_float32_from_bfloat16, operation<float, BFloat16>)

#define WEFT_OPTIMIZER_KERNELS(X)                         \
  WEFT_OPTIMIZER_KERNELS_OF(X, Sgd, sgd)                  \
  WEFT_OPTIMIZER_KERNELS_OF(X, SgdMomentum, sgd_momentum) \
  WEFT_OPTIMIZER_KERNELS_OF(X, Adam, adam)                \
  WEFT_OPTIMIZER_KERNELS_OF(X, AdamAmsgrad, adam_amsgrad)

#define WEFT_REDUCE_UNSIGNED(X, op, name)     \
  X(name##_uint8, Reduce<op, std::uint8_t>)   \
  X(name##_uint16, Reduce<op, std::uint16_t>) \
  X(name##_uint32, Reduce<op, std::uint32_t>) \
  X(name##_uint64, Reduce<op, std::uint64_t>)
#define WEFT_REDUCE_SIGNED(X, op, name)     \
  X(name##_int8, Reduce<op, std::int8_t>)   \
  X(name##_int16, Reduce<op, std::int16_t>) \
  X(name##_int32, Reduce<op, std::int32_t>) \
  X(name##_int64, Reduce<op, std::int64_t>)
#define WEFT_REDUCE_FLOAT(X, op, name)     \
  X(name##_float16, Reduce<op, Half>)      \
  X(name##_bfloat16, Reduce<op, BFloat16>) \
  X(name##_float32, Reduce<op, float>)     \
  X(name##_float64, Reduce<op, double>)

#define WEFT_REDUCE_KERNELS(X)                                      \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::Sum, sum)                       \
  WEFT_REDUCE_FLOAT(X, ReduceOp::Sum, sum)                          \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::Product, product)               \
  WEFT_REDUCE_FLOAT(X, ReduceOp::Product, product)                  \
  X(product_complex64, Reduce<ReduceOp::Product, Complex<float>>)   \
  X(product_complex128, Reduce<ReduceOp::Product, Complex<double>>) \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::Min, min)                       \
  WEFT_REDUCE_SIGNED(X, ReduceOp::Min, min)                         \
  WEFT_REDUCE_FLOAT(X, ReduceOp::Min, min)                          \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::Max, max)                       \
  WEFT_REDUCE_SIGNED(X, ReduceOp::Max, max)                         \
  WEFT_REDUCE_FLOAT(X, ReduceOp::Max, max)                          \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::BitAnd, bit_and)                \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::BitOr, bit_or)                  \
  WEFT_REDUCE_UNSIGNED(X, ReduceOp::BitXor, bit_xor)
