// SPDX-License-Identifier: Apache-2.0
// The types that a continuation of a Future may have: its result, and the reasons why a function
// cannot be one. For future.h.
#pragma once

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include <weft/engine/future/future_state.h>
#include <weft/engine/future/refusal.h>

namespace weft {

template <class T>
class Future;

namespace detail {

template <class... About>
struct CannotShare : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "futures share their value, and this value cannot be copied: get it at once with "
                  "sync<&f>(…), or leave it on its worker with remote<&f>(…)");
    return false;
  }
};
template <class... About>
struct ContinuesNothing : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a continuation of a Future<void> takes the Future, or nothing");
    return false;
  }
};
template <class... About>
struct ContinuesAnotherValue : Refusal {
  static constexpr bool accept() {
    static_assert(
        kNever<About...>,
        "a continuation takes the Future, or its value, and this one takes another type: write "
        "then([](Future<T> future) …) or then([](T value) …)");
    return false;
  }
};
template <class... About>
struct LooksAtAnotherValue : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "the function given to on_done() takes the Future, or its value, or nothing");
    return false;
  }
};
template <class T>
consteval auto refusal_of_sharing() {
  if constexpr (std::is_void_v<T> || std::is_copy_constructible_v<T>) {
    return Fine();
  } else {
    return CannotShare<T>();
  }
}
// The reason why an F cannot continue a Future<T>, or Fine.
template <class F, class T>
consteval auto refusal_of_continuation() {
  if constexpr (std::is_invocable_v<F&, Future<T>>) {
    return Fine();
  } else if constexpr (std::is_void_v<T>) {
    return std::conditional_t<std::is_invocable_v<F&>, Fine, ContinuesNothing<F>>();
  } else if constexpr (std::is_invocable_v<F&, T>) {
    return refusal_of_sharing<T>();
  } else {
    return ContinuesAnotherValue<F, T>();
  }
}
// The reason why an F cannot be called when a Future<T> is done, or Fine.
template <class F, class T>
consteval auto refusal_of_look() {
  if constexpr (std::is_invocable_v<F&, Future<T>> || std::is_invocable_v<F&>) {
    return Fine();
  } else if constexpr (std::is_void_v<T>) {
    return LooksAtAnotherValue<F>();
  } else {
    return first_of(
        std::conditional_t<std::is_invocable_v<F&, T>, Fine, LooksAtAnotherValue<F, T>>(),
        refusal_of_sharing<T>());
  }
}
// The result type of an F that continues a Future<T>.
template <class F, class T>
consteval auto type_of_continuation() {
  if constexpr (std::is_invocable_v<F&, Future<T>>) {
    return std::type_identity<std::remove_cvref_t<std::invoke_result_t<F&, Future<T>>>>();
  } else if constexpr (std::is_void_v<T>) {
    if constexpr (std::is_invocable_v<F&>) {
      return std::type_identity<std::remove_cvref_t<std::invoke_result_t<F&>>>();
    } else {
      return std::type_identity<Refused>();
    }
  } else if constexpr (std::is_invocable_v<F&, T>) {
    return std::type_identity<std::remove_cvref_t<std::invoke_result_t<F&, T>>>();
  } else {
    return std::type_identity<Refused>();
  }
}
template <class F, class T>
using Given = typename decltype(type_of_continuation<F, T>())::type;

template <class T>
struct IsFuture : std::false_type {};
template <class T>
struct IsFuture<Future<T>> : std::true_type {};

// Future<Future<T>> is never made: a continuation that returns a future is flattened.
template <class R>
struct Flat {
  using Type = R;
};
template <class T>
struct Flat<Future<T>> {
  using Type = T;
};

}  // namespace detail
}  // namespace weft
