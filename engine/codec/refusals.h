// SPDX-License-Identifier: Apache-2.0
// The reasons why a value cannot travel, each as a compiler's error; see future/refusal.h.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>

#include <weft/engine/codec/travelling.h>
#include <weft/engine/future/refusal.h>

namespace torch::nn {
class Module;
}

namespace weft {
template <class T>
class Future;
}

namespace weft::codec {

template <class... About>
struct HoldsAView : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(
        weft::detail::kNever<About...>,
        "a value that is sent cannot hold a view or a pointer (std::string_view, std::span, "
        "at::ArrayRef, T*), since the memory behind it is not sent; hold a std::string, a "
        "std::vector or the value itself");
    return false;
  }
};
template <class... About>
struct HoldsALongDouble : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(
        weft::detail::kNever<About...>,
        "a long double cannot be sent, since its format differs between machines; use a double "
        "(and std::chrono::duration<double>: a literal like 1.5s holds a long double)");
    return false;
  }
};
template <class... About>
struct IsAFuture : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "a Future cannot be sent: wait for it and send the value, or send an RRef");
    return false;
  }
};
template <class... About>
struct IsAFunction : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "a std::function cannot be sent: no code travels; write a function that both "
                  "programs have, and call it "
                  "there, by sync<&f>(…) or by a name that you send");
    return false;
  }
};
template <class... About>
struct IsAModule : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "a torch::nn module cannot be sent: make it where it runs, with remote<M>(…), "
                  "and send the RRef; or send "
                  "its parameters and buffers, weft::state_of(module), to a module there");
    return false;
  }
};
template <class... About>
struct HasNoFields : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "a value of this type cannot travel: write WEFT_FIELDS(a, b) with its members "
                  "into a struct of your own, "
                  "where it is public; of any other type send its parts, or an RRef to it");
    return false;
  }
};
template <class... About>
struct HasNoDefault : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(
        weft::detail::kNever<About...>,
        "a value is constructed before it is decoded: give this struct a default constructor, "
        "or send it as a std::tuple of its members");
    return false;
  }
};

template <class T>
constexpr bool is_future = false;
template <class T>
constexpr bool is_future<Future<T>> = true;
template <class T>
constexpr bool is_function = false;
template <class F>
constexpr bool is_function<std::function<F>> = true;
// True for a module or its holder.
template <class T>
constexpr bool is_module = requires(const T& value) {
  static_cast<const torch::nn::Module&>(value);
}
|| requires(const T& value) { static_cast<const torch::nn::Module&>(*value); };

template <class T>
consteval auto refusal_of();
template <class... T>
consteval auto refusal_of_all(std::type_identity<std::tuple<T...>>) {
  return weft::detail::first_of(refusal_of<T>()...);
}
// The reason why a T cannot travel, or Fine. For a struct, WEFT_FIELDS itself checks the fields.
template <class T>
consteval auto refusal_of() {
  if constexpr (is_future<T>) {
    return IsAFuture<T>();
  } else if constexpr (is_function<T>) {
    return IsAFunction<T>();
  } else if constexpr (HasFields<T>) {
    if constexpr (requires { T{}; }) {
      return weft::detail::Fine();
    } else {
      return HasNoDefault<T>();
    }
  } else if constexpr (HoldsView<T>::value) {
    return HoldsAView<T>();
  } else if constexpr (HoldsLongDouble<T>::value) {
    return HoldsALongDouble<T>();
  } else if constexpr (requires { typename Travels<T>::Parts; }) {
    return refusal_of_all(std::type_identity<typename Travels<T>::Parts>());
  } else if constexpr (Travels<T>::value || std::is_same_v<T, weft::detail::Refused>) {
    return weft::detail::Fine();
  } else if constexpr (is_module<T>) {
    return IsAModule<T>();
  } else {
    return HasNoFields<T>();
  }
}
template <class T>
using RefusalOf = decltype(refusal_of<T>());

}  // namespace weft::codec
