// SPDX-License-Identifier: Apache-2.0
// Decides by type which values can travel.
#pragma once

#include <array>
#include <chrono>
#include <complex>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>

#include <weft/engine/codec/msgpack.h>

namespace weft {
template <class T>
class RRef;
}

namespace weft::codec {

// Has WEFT_FIELDS, MSGPACK_DEFINE or the like.
template <class T>
concept HasFields = requires(const T& value, Packer& packer) {
  value.msgpack_pack(packer);
};

// True if T or its elements point to memory that they do not own: decoded, they would point into a
// message that is gone. Structs with fields are checked field by field when they are decoded.
template <class T>
struct HoldsView : std::is_pointer<T> {};
template <class C, class Traits>
struct HoldsView<std::basic_string_view<C, Traits>> : std::true_type {};
template <class E, std::size_t extent>
struct HoldsView<std::span<E, extent>> : std::true_type {};
template <class E>
struct HoldsView<c10::ArrayRef<E>> : std::true_type {};
template <class E>
struct HoldsView<std::initializer_list<E>> : std::true_type {};
template <class T>
struct HoldsView<std::reference_wrapper<T>> : std::true_type {};
template <class T>
struct HoldsView<RRef<T>> : std::false_type {};
template <class T, std::size_t elements>
struct HoldsView<std::array<T, elements>> : HoldsView<T> {};
template <template <class...> class C, class... T>
requires(!HasFields<C<T...>>) struct HoldsView<C<T...>>
    : std::disjunction<HoldsView<std::remove_cv_t<T>>...> {
};

// True if T is or holds a long double.
template <class T>
struct HoldsLongDouble : std::is_same<T, long double> {};
template <class T, std::size_t elements>
struct HoldsLongDouble<std::array<T, elements>> : HoldsLongDouble<T> {};
template <class Number, class Period>
struct HoldsLongDouble<std::chrono::duration<Number, Period>> : HoldsLongDouble<Number> {};
template <class T>
struct HoldsLongDouble<RRef<T>> : std::false_type {};
template <template <class...> class C, class... T>
requires(!HasFields<C<T...>>) struct HoldsLongDouble<C<T...>>
    : std::disjunction<HoldsLongDouble<std::remove_cv_t<T>>...> {
};

// True if a T can travel. Specialise it for a type that has msgpack adaptors instead of fields:
// those of msgpack-cxx itself, as std::complex has, or those of values.h.
template <class T>
struct Travels : std::bool_constant<(std::is_arithmetic_v<T> && !HoldsLongDouble<T>::value) ||
                                    std::is_enum_v<T> || HasFields<T>> {};
// A type that is made of parts P travels if they all do.
template <class... P>
struct MadeOf : std::conjunction<Travels<P>...> {
  using Parts = std::tuple<P...>;
};
template <>
struct Travels<std::monostate> : std::true_type {};
template <>
struct Travels<at::Tensor> : std::true_type {};
template <>
struct Travels<c10::Scalar> : std::true_type {};
template <>
struct Travels<c10::Device> : std::true_type {};
template <class T>
struct Travels<RRef<T>> : std::true_type {};
template <class Number, class Period>
struct Travels<std::chrono::duration<Number, Period>> : MadeOf<Number> {};
template <class Clock, class Duration>
struct Travels<std::chrono::time_point<Clock, Duration>> : MadeOf<Duration> {};
template <class Number>
struct Travels<std::complex<Number>> : MadeOf<Number> {};
template <class T, std::size_t elements>
struct Travels<T[elements]> : MadeOf<T> {};
template <class T>
struct Travels<std::optional<T>> : MadeOf<T> {};
template <class A, class B>
struct Travels<std::pair<A, B>> : MadeOf<std::remove_const_t<A>, B> {};
template <class... T>
struct Travels<std::tuple<T...>> : MadeOf<T...> {};
template <class... T>
struct Travels<std::variant<T...>> : MadeOf<T...> {};
template <class T>
struct Travels<std::unique_ptr<T>> : MadeOf<std::remove_const_t<T>> {};
template <class T>
struct Travels<std::shared_ptr<T>> : MadeOf<std::remove_const_t<T>> {};
// A container travels if its elements do.
template <class T>
requires requires(const T& values) {
  typename T::value_type;
  values.begin();
  values.end();
  requires !HasFields<T> && !HoldsView<T>::value && !std::is_same_v<typename T::value_type, T>;
}
struct Travels<T> : MadeOf<typename T::value_type> {};

}  // namespace weft::codec

// msgpack takes any type without an adaptor for a class with fields; refuse it here. clang-format
// takes the macro for the head of a function.
// clang-format off
namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(v1) {
namespace detail {

template <class T>
requires(!weft::codec::HasFields<T> && !weft::codec::HoldsView<T>::value)
struct packer_serializer<weft::codec::Buffer, T> {
  static weft::codec::Packer& pack(weft::codec::Packer& packer, const T&) {
    static_assert(!std::is_same_v<T, T>,
                  "a value of this type cannot travel: write WEFT_FIELDS(a, b) with its members "
                  "into a struct of your own; of any other type send its parts, or an RRef to it");
    return packer;
  }
};

}  // namespace detail
}
}  // namespace msgpack
// clang-format on
