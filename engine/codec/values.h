// SPDX-License-Identifier: Apache-2.0
// Adaptors for values beyond those that msgpack-cxx carries itself (numbers, strings, vector,
// array, map, set, tuple, pair, optional): tensors, libtorch's small values, enums, variants,
// durations, and structs by WEFT_FIELDS.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>

#include <weft/base/export.h>
#include <weft/engine/codec/containers.h>
#include <weft/engine/codec/stream.h>

namespace weft::codec {

template <class... Fields>
using RefusalOfFields =
    decltype(weft::detail::first_of(RefusalOf<std::remove_const_t<Fields>>()...));

template <class... Fields>
void pack_fields(Packer& packer, const std::tuple<Fields&...>& fields) {
  if constexpr (RefusalOfFields<Fields...>::accept()) {
    packer.pack_array(sizeof...(Fields));
    std::apply([&](const auto&... field) { (packer.pack(field), ...); }, fields);
  }
}

// Throws msgpack::type_error if the number of fields differs: another version of the struct.
template <class... Fields>
void unpack_fields(const msgpack::object& object, const std::tuple<Fields&...>& fields) {
  if constexpr (RefusalOfFields<Fields...>::accept()) {
    if (object.type != msgpack::type::ARRAY || object.via.array.size != sizeof...(Fields))
      throw msgpack::type_error();
    const msgpack::object* next = object.via.array.ptr;
    std::apply([&](auto&... field) { ((next++)->convert(field), ...); }, fields);
  }
}

template <std::size_t i, class Variant>
void unpack_alternative(const msgpack::object& value, std::uint64_t index, Variant& variant) {
  if constexpr (i < std::variant_size_v<Variant>) {
    if (index != i) return unpack_alternative<i + 1>(value, index, variant);
    using Alternative = std::variant_alternative_t<i, Variant>;
    if constexpr (std::is_same_v<Alternative, std::monostate>) {
      variant.template emplace<i>();
    } else {
      variant.template emplace<i>(unpacked<Alternative>(value));
    }
  } else {
    throw msgpack::type_error();
  }
}

WEFT_API void pack_scalar(Packer& packer, const c10::Scalar& scalar);
WEFT_API c10::Scalar unpack_scalar(const msgpack::object& object);

}  // namespace weft::codec

// Makes a struct that travels: struct Point { double x, y; WEFT_FIELDS(x, y) };
#define WEFT_FIELDS(...)                                              \
  auto weft_fields() const { return std::tie(__VA_ARGS__); }          \
  template <class WeftPacker>                                         \
  void msgpack_pack(WeftPacker& weft_packer) const {                  \
    ::weft::codec::pack_fields(weft_packer, weft_fields());           \
  }                                                                   \
  void msgpack_unpack(const ::msgpack::object& weft_object) {         \
    ::weft::codec::unpack_fields(weft_object, std::tie(__VA_ARGS__)); \
  }

// clang-format takes the macro for the head of a function.
// clang-format off
namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
namespace adaptor {

template <>
struct pack<at::Tensor> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, const at::Tensor& tensor) const {
    weft::codec::Writer::current().tensors().pack(packer, tensor);
    return packer;
  }
};
template <>
struct convert<at::Tensor> {
  const msgpack::object& operator()(const msgpack::object& object, at::Tensor& tensor) const {
    tensor = weft::codec::Reader::current().tensors().unpack(object);
    return object;
  }
};

template <>
struct pack<c10::Scalar> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, const c10::Scalar& scalar) const {
    weft::codec::pack_scalar(packer, scalar);
    return packer;
  }
};
template <>
struct convert<c10::Scalar> {
  const msgpack::object& operator()(const msgpack::object& object, c10::Scalar& scalar) const {
    scalar = weft::codec::unpack_scalar(object);
    return object;
  }
};

template <>
struct pack<c10::Device> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, const c10::Device& device) const {
    packer.pack_array(2);
    packer.pack_int8(static_cast<std::int8_t>(device.type()));
    packer.pack_int8(device.index());
    return packer;
  }
};
template <>
struct convert<c10::Device> {
  const msgpack::object& operator()(const msgpack::object& object, c10::Device& device) const {
    const auto [type, index] = object.as<std::pair<std::int8_t, std::int8_t>>();
    if (type < 0 || type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES || index < -1) throw msgpack::type_error();
    device = c10::Device(static_cast<c10::DeviceType>(type), index);
    return object;
  }
};
template <class T>
struct pack<T, std::enable_if_t<std::is_enum_v<T>>> {
  template <class Stream>
  msgpack::packer<Stream>& operator()(msgpack::packer<Stream>& packer, T value) const {
    return packer.pack(static_cast<std::underlying_type_t<T>>(value));
  }
};
template <class T>
requires(!std::is_same_v<T, c10::ScalarType> && !std::is_same_v<T, c10::Layout> && !std::is_same_v<T, c10::MemoryFormat>)
struct convert<T, std::enable_if_t<std::is_enum_v<T>>> {
  const msgpack::object& operator()(const msgpack::object& object, T& value) const {
    value = static_cast<T>(object.as<std::underlying_type_t<T>>());
    return object;
  }
};

// libtorch looks these up in tables by their numbers, without checking the range.
template <class T>
requires(std::is_same_v<T, c10::ScalarType> || std::is_same_v<T, c10::Layout> || std::is_same_v<T, c10::MemoryFormat>)
struct convert<T> {
  const msgpack::object& operator()(const msgpack::object& object, T& value) const {
    const auto number = object.as<std::underlying_type_t<T>>();
    if (number < 0 || number >= static_cast<std::underlying_type_t<T>>(T::NumOptions)) throw msgpack::type_error();
    value = static_cast<T>(number);
    return object;
  }
};

// A UTF-8, UTF-16 or UTF-32 code unit travels as its number.
template <class T>
requires(std::is_same_v<T, char8_t> || std::is_same_v<T, char16_t> || std::is_same_v<T, char32_t>)
struct pack<T> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, T character) const {
    return packer.pack_uint32(static_cast<std::uint32_t>(character));
  }
};
template <class T>
requires(std::is_same_v<T, char8_t> || std::is_same_v<T, char16_t> || std::is_same_v<T, char32_t>)
struct convert<T> {
  const msgpack::object& operator()(const msgpack::object& object, T& character) const {
    const auto number = object.as<std::uint32_t>();
    if (number > static_cast<std::uint32_t>(std::numeric_limits<T>::max())) throw msgpack::type_error();
    character = static_cast<T>(number);
    return object;
  }
};

// An empty array, since nil is an empty optional around the value.
template <>
struct pack<std::monostate> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, std::monostate) const { return packer.pack_array(0); }
};
template <>
struct convert<std::monostate> {
  const msgpack::object& operator()(const msgpack::object& object, std::monostate&) const {
    if (object.type != msgpack::type::ARRAY || object.via.array.size != 0) throw msgpack::type_error();
    return object;
  }
};

template <class... T>
struct pack<std::variant<T...>> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, const std::variant<T...>& variant) const {
    packer.pack_array(2);
    packer.pack_uint64(variant.index());
    std::visit(
        [&]<class V>(const V& value) {
          if constexpr (std::is_same_v<V, std::monostate>) {
            packer.pack_nil();
          } else {
            packer.pack(value);
          }
        },
        variant);
    return packer;
  }
};
template <class... T>
struct convert<std::variant<T...>> {
  const msgpack::object& operator()(const msgpack::object& object, std::variant<T...>& variant) const {
    if (object.type != msgpack::type::ARRAY || object.via.array.size != 2) throw msgpack::type_error();
    const msgpack::object* fields = object.via.array.ptr;
    weft::codec::unpack_alternative<0>(fields[1], fields[0].as<std::uint64_t>(), variant);
    return object;
  }
};

template <class Number, class Period>
struct pack<std::chrono::duration<Number, Period>> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, const std::chrono::duration<Number, Period>& duration) const {
    return packer.pack(duration.count());
  }
};
template <class Number, class Period>
struct convert<std::chrono::duration<Number, Period>> {
  const msgpack::object& operator()(const msgpack::object& object, std::chrono::duration<Number, Period>& duration) const {
    duration = std::chrono::duration<Number, Period>(object.as<Number>());
    return object;
  }
};

#ifdef MSGPACK_NO_BOOST  // msgpack-cxx has its own with Boost
template <class Clock, class Duration>
struct pack<std::chrono::time_point<Clock, Duration>> {
  weft::codec::Packer& operator()(weft::codec::Packer& packer, const std::chrono::time_point<Clock, Duration>& point) const {
    return packer.pack(point.time_since_epoch());
  }
};
template <class Clock, class Duration>
struct convert<std::chrono::time_point<Clock, Duration>> {
  const msgpack::object& operator()(const msgpack::object& object, std::chrono::time_point<Clock, Duration>& point) const {
    point = std::chrono::time_point<Clock, Duration>(object.as<Duration>());
    return object;
  }
};
#endif

}  // namespace adaptor
}
}  // namespace msgpack
// clang-format on
