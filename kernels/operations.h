// SPDX-License-Identifier: Apache-2.0
// The code that the CPU and the CUDA implementation share: the checks, the choice of the operation
// for given element types, and the loop over the tensors. Each entry point takes an Executor, which
// has
//   Device device() const                     the device that every slice must be on
//   auto batch(Operation) const               an object with add(elements, {pointer per array})
//                                             and launch()
//   auto launches(trace::Name, bytes) const   an object that shows the launches of one call in
//                                             the timeline while it lives
#pragma once

#include <cmath>
#include <optional>
#include <span>

#include <weft/kernels/checks.h>
#include <weft/kernels/optimizer.h>
#include <weft/kernels/optimizer_elements.h>
#include <weft/profiling/trace/trace.h>

namespace weft::kernels {

namespace traced {
inline constinit trace::Name cast{trace::Layer::Kernels, "cast"};
inline constinit trace::Name pack{trace::Layer::Kernels, "pack"};
inline constinit trace::Name unpack{trace::Layer::Kernels, "unpack"};
inline constinit trace::Name scale{trace::Layer::Kernels, "scale"};
inline constinit trace::Name reduce{trace::Layer::Kernels, "reduce"};
inline constinit trace::Name sgd_step{trace::Layer::Kernels, "sgd_step"};
inline constinit trace::Name adamw_step{trace::Layer::Kernels, "adamw_step"};
}  // namespace traced

template <class T>
struct Type {
  using type = T;
};

// Calls `function` with the Type of a floating-point dtype. Returns false for other dtypes.
template <class Function>
bool with_float(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::Float16: return function(Type<Half>()), true;
    case Dtype::BFloat16: return function(Type<BFloat16>()), true;
    case Dtype::Float32: return function(Type<float>()), true;
    case Dtype::Float64: return function(Type<double>()), true;
    default: return false;
  }
}

// Calls `function` with the Type of the unsigned integer of `bytes` bytes.
template <class Function>
void with_unsigned(std::size_t bytes, Function&& function) {
  switch (bytes) {
    case 1: return function(Type<std::uint8_t>());
    case 2: return function(Type<std::uint16_t>());
    case 4: return function(Type<std::uint32_t>());
    default: return function(Type<std::uint64_t>());
  }
}

// Calls `function` with the Cast or Copy of a checked pair.
template <class Function>
void with_cast(const CastTypes& types, double scale, Function&& function) {
  if (types.is_copy)
    return with_unsigned(types.from_bytes, [&]<class T>(Type<T>) { function(Copy<T>{}); });
  with_float(types.from, [&]<class From>(Type<From>) {
    with_float(types.to, [&]<class To>(Type<To>) {
      function(Cast<From, To>{static_cast<typename Cast<From, To>::Scale>(scale)});
    });
  });
}

template <class Executor>
void cast(Executor executor, std::span<const Slice> from, Dtype from_dtype,
          std::span<const Slice> to, Dtype to_dtype, double scale) {
  std::size_t bytes = 0;
  for (const Slice& slice : to) bytes += slice.bytes;
  const trace::Range range(traced::cast, {.bytes = bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::cast, bytes);
  const Call call{"cast", executor.device()};
  const CastTypes types = call.cast_types(from_dtype, to_dtype, scale);
  call.check_pairs(from, from_dtype, to, to_dtype);
  with_cast(types, scale, [&](auto operation) {
    auto batch = executor.batch(operation);
    for (std::size_t i = 0; i < from.size(); ++i)
      batch.add(from[i].bytes / types.from_bytes, {from[i].data, to[i].data});
    batch.launch();
  });
}

template <class Executor>
void pack(Executor executor, std::span<const Slice> from, Dtype from_dtype, Slice to,
          Dtype to_dtype, double scale) {
  const trace::Range range(traced::pack, {.bytes = to.bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::pack, to.bytes);
  const Call call{"pack", executor.device()};
  const CastTypes types = call.cast_types(from_dtype, to_dtype, scale);
  call.check_flat(from, from_dtype, to, to_dtype);
  with_cast(types, scale, [&](auto operation) {
    auto batch = executor.batch(operation);
    auto* slot = static_cast<std::byte*>(to.data);
    for (const Slice& slice : from) {
      const std::size_t elements = slice.bytes / types.from_bytes;
      batch.add(elements, {slice.data, slot});
      slot += elements * types.to_bytes;
    }
    batch.launch();
  });
}

template <class Executor>
void unpack(Executor executor, Slice from, Dtype from_dtype, std::span<const Slice> to,
            Dtype to_dtype, double scale) {
  const trace::Range range(traced::unpack, {.bytes = from.bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::unpack, from.bytes);
  const Call call{"unpack", executor.device()};
  const CastTypes types = call.cast_types(from_dtype, to_dtype, scale);
  call.check_flat(to, to_dtype, from, from_dtype);
  with_cast(types, scale, [&](auto operation) {
    auto batch = executor.batch(operation);
    auto* slot = static_cast<std::byte*>(from.data);
    for (const Slice& slice : to) {
      const std::size_t elements = slice.bytes / types.to_bytes;
      batch.add(elements, {slot, slice.data});
      slot += elements * types.from_bytes;
    }
    batch.launch();
  });
}

template <class Executor>
void scale(Executor executor, Slice slice, Dtype dtype, double factor) {
  const trace::Range range(traced::scale, {.bytes = slice.bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::scale, slice.bytes);
  const Call call{"scale", executor.device()};
  call.check_pairs({&slice, 1}, dtype, {&slice, 1}, dtype);
  const CastTypes types = call.cast_types(dtype, dtype, factor);
  if (types.is_copy) return;  // a factor of 1
  with_cast(types, factor, [&](auto operation) {
    auto batch = executor.batch(operation);
    batch.add(slice.bytes / types.from_bytes, {slice.data, slice.data});
    batch.launch();
  });
}

// Calls `function` with the Reduce of a supported pair. Bools are bytes of 0 or 1, so the bitwise
// operators serve as the logical ones. Signed integers share the unsigned ones' code if the result
// has the same bits; complex sums are sums of the parts.
template <ReduceOp op, class Function>
void with_reduce(Dtype dtype, Function&& function) {
  constexpr bool kOrdered = op == ReduceOp::Min || op == ReduceOp::Max;
  constexpr bool kBitwise =
      op == ReduceOp::BitAnd || op == ReduceOp::BitOr || op == ReduceOp::BitXor;
  constexpr bool kOrOfBools = op == ReduceOp::Sum || op == ReduceOp::Max;
  constexpr ReduceOp kOfBools = kBitwise ? op : kOrOfBools ? ReduceOp::BitOr : ReduceOp::BitAnd;
  const auto of = [&]<class T>(Type<T>) { function(Reduce<op, T>{}); };
  if (dtype == Dtype::Bool) return function(Reduce<kOfBools, std::uint8_t>{});
  if constexpr (!kBitwise) {
    if (with_float(op == ReduceOp::Sum ? real_of(dtype) : dtype, of)) return;
  }
  if constexpr (op == ReduceOp::Product) {
    if (dtype == Dtype::ComplexFloat32) return function(Reduce<op, Complex<float>>{});
    if (dtype == Dtype::ComplexFloat64) return function(Reduce<op, Complex<double>>{});
  }
  if constexpr (kOrdered) {
    switch (dtype) {
      case Dtype::Int8: return of(Type<std::int8_t>());
      case Dtype::Int16: return of(Type<std::int16_t>());
      case Dtype::Int32: return of(Type<std::int32_t>());
      case Dtype::Int64: return of(Type<std::int64_t>());
      default: break;
    }
  }
  with_unsigned(size_of(dtype), of);
}

template <class Function>
void with_reduce(ReduceOp op, Dtype dtype, Function&& function) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg: return with_reduce<ReduceOp::Sum>(dtype, function);
    case ReduceOp::Product: return with_reduce<ReduceOp::Product>(dtype, function);
    case ReduceOp::Min: return with_reduce<ReduceOp::Min>(dtype, function);
    case ReduceOp::Max: return with_reduce<ReduceOp::Max>(dtype, function);
    case ReduceOp::BitAnd: return with_reduce<ReduceOp::BitAnd>(dtype, function);
    case ReduceOp::BitOr: return with_reduce<ReduceOp::BitOr>(dtype, function);
    case ReduceOp::BitXor: return with_reduce<ReduceOp::BitXor>(dtype, function);
  }
}

template <class T>
constexpr std::size_t kElementBytes = 0;
template <ReduceOp op, class T>
constexpr std::size_t kElementBytes<Reduce<op, T>> = sizeof(T);

template <class Executor>
void reduce(Executor executor, Slice out, Slice a, Slice b, Dtype dtype, ReduceOp op) {
  const trace::Range range(traced::reduce, {.bytes = out.bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::reduce, out.bytes);
  Call{"reduce", executor.device()}.check_reduce(out, a, b, dtype, op);
  with_reduce(op, dtype, [&]<class Operation>(Operation operation) {
    auto batch = executor.batch(operation);
    batch.add(out.bytes / kElementBytes<Operation>, {a.data, b.data, out.data});
    batch.launch();
  });
}

// Calls `function` with the Types of parameter and gradient of a checked pair.
template <class Function>
void with_optimizer_types(Dtype dtype, Dtype gradient_dtype, Function&& function) {
  with_float(dtype, [&]<class P>(Type<P>) {
    if (gradient_dtype == dtype) return function(Type<P>(), Type<P>());
    if constexpr (std::is_same_v<P, float>) {
      if (gradient_dtype == Dtype::Float16) return function(Type<P>(), Type<Half>());
      function(Type<P>(), Type<BFloat16>());
    }
  });
}

template <class P>
SgdScalars<P> sgd_scalars(const SgdOptions& options, bool first_step) {
  using Scalar = typename SgdScalars<P>::Scalar;
  return {.lr = static_cast<Scalar>(options.lr),
          .weight_decay = static_cast<Scalar>(options.weight_decay),
          .momentum = static_cast<Scalar>(options.momentum),
          .undampened = static_cast<Scalar>(1 - options.dampening),
          .nesterov = options.nesterov,
          .maximize = options.maximize,
          .first_step = first_step};
}

template <class Tensor>
std::size_t bytes_of_parameters(std::span<const Tensor> tensors) {
  std::size_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.parameter.bytes;
  return bytes;
}

template <class Executor>
void sgd_step(Executor executor, std::span<const SgdTensor> tensors, Dtype dtype,
              Dtype gradient_dtype, const SgdOptions& options) {
  const std::size_t all_bytes = bytes_of_parameters(tensors);
  const trace::Range range(traced::sgd_step, {.bytes = all_bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::sgd_step, all_bytes);
  Call{"sgd_step", executor.device()}.check_sgd(tensors, dtype, gradient_dtype, options);
  const std::size_t bytes = size_of(dtype);
  with_optimizer_types(dtype, gradient_dtype, [&]<class P, class G>(Type<P>, Type<G>) {
    if (options.momentum == 0) {
      auto batch = executor.batch(Sgd<P, G>{sgd_scalars<P>(options, false)});
      for (const SgdTensor& t : tensors)
        batch.add(t.parameter.bytes / bytes, {t.gradient.data, t.parameter.data});
      return batch.launch();
    }
    for (const bool first_step : {false, true}) {
      auto batch = executor.batch(SgdMomentum<P, G>{sgd_scalars<P>(options, first_step)});
      for (const SgdTensor& t : tensors) {
        if (t.first_step != first_step) continue;
        batch.add(t.parameter.bytes / bytes,
                  {t.gradient.data, t.parameter.data, t.momentum_buffer.data});
      }
      batch.launch();
    }
  });
}

// The bias corrections are computed in fp64, as in libtorch.
template <class P>
AdamScalars<P> adam_scalars(const AdamWOptions& options, std::int64_t step) {
  using Scalar = typename AdamScalars<P>::Scalar;
  const double correction1 = 1 - std::pow(options.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(options.beta2, static_cast<double>(step));
  const bool decoupled = options.decoupled_weight_decay;
  return {.decay = static_cast<Scalar>(decoupled ? 1 - options.lr * options.weight_decay : 1),
          .l2 = static_cast<Scalar>(decoupled ? 0 : options.weight_decay),
          .beta1 = static_cast<Scalar>(options.beta1),
          .rest1 = static_cast<Scalar>(1 - options.beta1),
          .beta2 = static_cast<Scalar>(options.beta2),
          .rest2 = static_cast<Scalar>(1 - options.beta2),
          .correction2 = static_cast<Scalar>(std::sqrt(correction2)),
          .step_size = static_cast<Scalar>(options.lr / correction1),
          .eps = static_cast<Scalar>(options.eps),
          .maximize = options.maximize};
}

// Returns the smallest step count above `after` among the tensors. Parameters that had no gradient
// in some step lag behind the others.
inline std::optional<std::int64_t> next_step(std::span<const AdamWTensor> tensors,
                                             std::int64_t after) {
  std::optional<std::int64_t> next;
  for (const AdamWTensor& t : tensors) {
    if (t.step > after && (!next || t.step < *next)) next = t.step;
  }
  return next;
}

template <class Executor>
void adamw_step(Executor executor, std::span<const AdamWTensor> tensors, Dtype dtype,
                Dtype gradient_dtype, const AdamWOptions& options) {
  const std::size_t all_bytes = bytes_of_parameters(tensors);
  const trace::Range range(traced::adamw_step, {.bytes = all_bytes});
  [[maybe_unused]] const auto shown = executor.launches(traced::adamw_step, all_bytes);
  Call{"adamw_step", executor.device()}.check_adamw(tensors, dtype, gradient_dtype, options);
  const std::size_t bytes = size_of(dtype);
  with_optimizer_types(dtype, gradient_dtype, [&]<class P, class G>(Type<P>, Type<G>) {
    const auto run = [&]<class Operation>(std::int64_t step, const Operation& operation) {
      auto batch = executor.batch(operation);
      for (const AdamWTensor& t : tensors) {
        if (t.step != step) continue;
        const std::size_t elements = t.parameter.bytes / bytes;
        void *g = t.gradient.data, *p = t.parameter.data, *m = t.exp_avg.data,
             *v = t.exp_avg_sq.data;
        if constexpr (Operation::Arrays::kCount == 4) batch.add(elements, {g, p, m, v});
        if constexpr (Operation::Arrays::kCount == 5)
          batch.add(elements, {g, p, m, v, t.max_exp_avg_sq.data});
      }
      batch.launch();
    };
    for (auto step = next_step(tensors, 0); step; step = next_step(tensors, *step)) {
      const AdamScalars<P> scalars = adam_scalars<P>(options, *step);
      if (options.amsgrad) {
        run(*step, AdamAmsgrad<P, G>{scalars});
      } else {
        run(*step, Adam<P, G>{scalars});
      }
    }
  });
}

}  // namespace weft::kernels
