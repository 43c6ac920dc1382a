// SPDX-License-Identifier: Apache-2.0
// The element functions of the data path: each combines one element of each array. One CPU loop
// (host_loop.h) and one CUDA grid (segments.h) run them, so both give the same result bit for bit
// (except NaN payloads). For that, these sources are compiled without contracting a * b + c into
// one rounding (kernels/CMakeLists.txt).
//
// An operation is a struct with the list of its arrays (inputs first), its scalars, and an
// operator() over one element of each array.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <weft/kernels/float16.h>
#include <weft/kernels/reduce_op.h>

namespace weft::kernels {

template <class T>
struct In {
  using Element = T;
  static constexpr bool kRead = true, kWritten = false;
};
template <class T>
struct Out {
  using Element = T;
  static constexpr bool kRead = false, kWritten = true;
};
template <class T>
struct InOut {
  using Element = T;
  static constexpr bool kRead = true, kWritten = true;
};

template <class... Arrays>
struct ArrayList {
  static constexpr unsigned kCount = sizeof...(Arrays);
};

// The type in which elements of T are computed.
template <class T>
using Compute = decltype(widen(T{}));

template <class From, class To>
struct Cast {
  using Scale = std::conditional_t<std::is_same_v<To, double>, double, Compute<From>>;
  using Arrays = ArrayList<In<From>, Out<To>>;
  Scale scale;

  WEFT_HOST_DEVICE void operator()(const From& from, To& to) const {
    to = narrow<To>(static_cast<Scale>(widen(from)) * scale);
  }
};

// Copies bytes; T is an unsigned integer of the element's size.
template <class T>
struct Copy {
  using Arrays = ArrayList<In<T>, Out<T>>;
  WEFT_HOST_DEVICE void operator()(const T& from, T& to) const { to = from; }
};

template <class T>
struct Complex {
  T real, imaginary;
};

// Integers wrap around, as in libtorch; the arithmetic is unsigned because signed overflow is
// undefined.
template <class T>
WEFT_HOST_DEVICE T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) +
                          static_cast<std::make_unsigned_t<T>>(b));
  } else {
    return narrow<T>(widen(a) + widen(b));
  }
}

template <class T>
WEFT_HOST_DEVICE T product(T a, T b) {
  // With 1u, because two uint16 would be promoted to int, which would overflow.
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(1u * static_cast<std::make_unsigned_t<T>>(a) *
                          static_cast<std::make_unsigned_t<T>>(b));
  } else {
    return narrow<T>(widen(a) * widen(b));
  }
}

template <class T>
WEFT_HOST_DEVICE Complex<T> product(Complex<T> a, Complex<T> b) {
  return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

// Returns NaN if either side is NaN, as torch.minimum and torch.maximum do.
template <class T>
WEFT_HOST_DEVICE T minimum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a < b ? a : b;
  } else {
    return widen(a) < widen(b) || widen(a) != widen(a) ? a : b;
  }
}

template <class T>
WEFT_HOST_DEVICE T maximum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a > b ? a : b;
  } else {
    return widen(a) > widen(b) || widen(a) != widen(a) ? a : b;
  }
}

template <ReduceOp op, class T>
struct Reduce {
  using Arrays = ArrayList<In<T>, In<T>, Out<T>>;

  WEFT_HOST_DEVICE void operator()(const T& a, const T& b, T& out) const {
    if constexpr (op == ReduceOp::Sum) out = sum(a, b);
    if constexpr (op == ReduceOp::Product) out = product(a, b);
    if constexpr (op == ReduceOp::Min) out = minimum(a, b);
    if constexpr (op == ReduceOp::Max) out = maximum(a, b);
    if constexpr (op == ReduceOp::BitAnd) out = static_cast<T>(a & b);
    if constexpr (op == ReduceOp::BitOr) out = static_cast<T>(a | b);
    if constexpr (op == ReduceOp::BitXor) out = static_cast<T>(a ^ b);
  }
};

}  // namespace weft::kernels
