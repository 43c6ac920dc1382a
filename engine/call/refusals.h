// SPDX-License-Identifier: Apache-2.0
// Refusals by the compiler: functions that cannot be called remotely, and arguments that they
// cannot take. See future/refusal.h.
#pragma once

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include <weft/engine/codec/refusals.h>
#include <weft/engine/future/refusal.h>

namespace weft::call::detail {

using codec::is_future;
using weft::detail::about;
using weft::detail::Fine;
using weft::detail::first_of;
using weft::detail::kNever;
using weft::detail::Refusal;
using weft::detail::Refused;

template <class... About>
struct IsNoFunction : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "this is no function that can be called remotely: a lambda or function object "
                  "has no name that another "
                  "process could call; write a function, or a member function for RRef, and pass "
                  "its address (&f); pick an "
                  "overload with static_cast");
    return false;
  }
};
template <class... About>
struct NeedsAnRRef : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "this is a member function: call it through an RRef, rref.sync<&M::method>(…)");
    return false;
  }
};
template <class... About>
struct IsOfAnotherClass : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "this is a member function of another class than the RRef's value is of");
    return false;
  }
};
template <class... About>
struct TakesAReference : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a function that is called remotely cannot take a non-const lvalue reference: "
                  "the caller would not see the "
                  "change; take the parameter by value and return what changed");
    return false;
  }
};
template <class... About>
struct TakesAView : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a function that is called remotely cannot take a view or a pointer, nor a "
                  "container of them "
                  "(std::string_view, std::span, at::ArrayRef, T*): what it points to does not "
                  "travel with it; take a "
                  "std::string, a std::vector, the value itself, or an RRef to it");
    return false;
  }
};
template <class... About>
struct GivesAView : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a function that is called remotely cannot return a view or a pointer, nor a "
                  "container of them "
                  "(std::string_view, std::span, at::ArrayRef, T*): what it points to does not "
                  "travel with it; return a "
                  "std::string, a std::vector, the value itself, or an RRef to it");
    return false;
  }
};
template <class... About>
struct CannotBeMoved : Refusal {
  static constexpr bool accept() {
    static_assert(
        kNever<About...>,
        "a function that is called remotely cannot return a value that cannot be moved; make "
        "it in place, with remote<M>(…)");
    return false;
  }
};
template <class... About>
struct CannotBeShared : Refusal {
  static constexpr bool accept() {
    static_assert(
        kNever<About...>,
        "a function that is called remotely cannot return a Future of a value that cannot be "
        "copied: futures share their value; return an RRef to it");
    return false;
  }
};
template <class... About>
struct IsAFutureOfAFuture : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a function that is called remotely cannot return a Future of a Future: return "
                  "future.then(…), which is one Future of the final value, or co_await the inner "
                  "one");
    return false;
  }
};
template <class... About>
struct TakesAnotherNumber : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "the function takes another number of arguments, after the destination (defaults "
                  "are not known to remote calls: give all)");
    return false;
  }
};
template <class... About>
struct MethodTakesAnotherNumber : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "the method takes another number of arguments (defaults are not known to remote "
                  "calls: give all)");
    return false;
  }
};
template <class... About>
struct TakesACopy : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a function that is called on the value of an RRef, and is not a member of its "
                  "class, takes the value first, "
                  "by reference: M&, or const M&");
    return false;
  }
};
template <class... About>
struct IsOfAnotherType : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "an argument cannot be converted to the type that the function takes: the first "
                  "of the two types is what "
                  "it takes, the second is what it is given");
    return false;
  }
};
template <class... About>
struct MustBeMoved : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "an argument that cannot be copied must be moved: give std::move(argument)");
    return false;
  }
};
template <class... About>
struct HasToBeWaitedFor : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "an argument cannot be converted to the type that the function takes: it is a "
                  "Future; give future.get(), "
                  "or go on in future.then(…)");
    return false;
  }
};
template <class... About>
struct HasToBeFetched : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "an argument cannot be converted to the type that the function takes: it is an "
                  "RRef; give rref.to_here(), "
                  "or have the function take the RRef");
    return false;
  }
};

template <class... About>
struct HasNoConstructor : Refusal {
  static constexpr bool accept() {
    static_assert(
        kNever<About...>,
        "M has no constructor that takes these arguments, as the types as which they are sent");
    return false;
  }
};

// Finds why a parameter cannot be a P.
template <class P>
consteval auto refusal_of_parameter() {
  using T = std::remove_cvref_t<P>;
  if constexpr (std::is_lvalue_reference_v<P> && !std::is_const_v<std::remove_reference_t<P>>) {
    return TakesAReference<P>();
  } else if constexpr (std::is_same_v<codec::RefusalOf<T>, codec::HoldsAView<T>>) {
    return TakesAView<P>();
  } else {
    return codec::RefusalOf<T>();
  }
}

// Finds why a function cannot return an R, or a Future<R> if it is deferred.
template <class R, bool deferred>
consteval auto refusal_of_returned() {
  if constexpr (std::is_void_v<R>) {
    return Fine();
  } else if constexpr (is_future<R>) {
    return IsAFutureOfAFuture<R>();
  } else if constexpr (!std::is_move_constructible_v<R>) {
    return CannotBeMoved<R>();
  } else if constexpr (deferred && !std::is_copy_constructible_v<R>) {
    return CannotBeShared<R>();
  } else {
    return Fine();
  }
}

// Finds why an R cannot be sent back to the caller.
template <class R>
consteval auto refusal_of_result() {
  if constexpr (std::is_void_v<R>) {
    return Fine();
  } else if constexpr (std::is_same_v<codec::RefusalOf<R>, codec::HoldsAView<R>>) {
    return GivesAView<R>();
  } else {
    return codec::RefusalOf<R>();
  }
}

template <class R>
using RefusalOfResult = decltype(refusal_of_result<R>());

// Whether an A can be given for a P, as in a call in this process: explicit constructors, and those
// of aggregates, do not count. Text of all types stands for a std::string.
template <class P, class A>
constexpr bool kTakes = std::is_constructible_v<P, A&&> &&
                        (std::is_convertible_v<A&&, P> ||
                         (std::is_convertible_v<A&&, std::string_view> &&
                          std::is_convertible_v<std::string, P>));

// Finds why a function that takes a P cannot be called with an A.
template <class P, class A>
consteval auto refusal_of_argument() {
  using Given = std::remove_cvref_t<A>;
  if constexpr (kTakes<P, A>) {
    return Fine();
  } else if constexpr (is_future<Given>) {
    return HasToBeWaitedFor<P, Given>();
  } else if constexpr (std::is_same_v<Given, RRef<P>>) {
    return HasToBeFetched<P, Given>();
  } else if constexpr (kTakes<P, Given>) {
    return MustBeMoved<P, Given>();
  } else {
    return IsOfAnotherType<P, A>();
  }
}

// Finds why a function that takes P… cannot be called with A….
template <template <class...> class AnotherNumber, class... A, class... P>
consteval auto refusal_of_arguments(std::type_identity<std::tuple<P...>>) {
  if constexpr (sizeof...(A) != sizeof...(P)) {
    return AnotherNumber<std::tuple<P...>, A...>();
  } else if constexpr (sizeof...(A) == 0 || ((kTakes<P, A> && ...) &&
                                             std::is_constructible_v<std::tuple<P...>, A&&...>)) {
    return Fine();
  } else {
    return first_of(refusal_of_argument<P, A>()...,
                    IsOfAnotherType<std::tuple<P...>, std::tuple<A...>>());
  }
}

}  // namespace weft::call::detail
