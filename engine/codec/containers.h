// SPDX-License-Identifier: Apache-2.0
// msgpack converts into an existing object, so each value is made before it is decoded. A type
// without a default constructor (c10::Device, and pairs, tuples, arrays and variants that begin
// with one) is made blank. Containers of such types are decoded element by element here, since
// msgpack would need the default constructor.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include <c10/core/Device.h>

#include <weft/engine/codec/msgpack.h>
#include <weft/engine/codec/refusals.h>
#include <weft/engine/codec/travelling.h>

namespace weft::codec {

template <class T>
struct Blank {
  static T make() { return T{}; }
};
template <>
struct Blank<c10::Device> {
  static c10::Device make() { return c10::Device(c10::kCPU); }
};
template <class... T>
struct Blank<std::tuple<T...>> {
  static std::tuple<T...> make() { return std::tuple<T...>(Blank<T>::make()...); }
};
template <class A, class B>
struct Blank<std::pair<A, B>> {
  static std::pair<A, B> make() { return {Blank<A>::make(), Blank<B>::make()}; }
};
template <class T, std::size_t elements>
struct Blank<std::array<T, elements>> {
  static std::array<T, elements> make() {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return std::array<T, elements>{(static_cast<void>(i), Blank<T>::make())...};
    }
    (std::make_index_sequence<elements>());
  }
};
template <class First, class... T>
struct Blank<std::variant<First, T...>> {
  static std::variant<First, T...> make() {
    return std::variant<First, T...>(std::in_place_index<0>, Blank<First>::make());
  }
};

template <class T>
concept NeedsBlank = !std::default_initializable<T>;

template <class T>
T unpacked(const msgpack::object& object) {
  T value = Blank<T>::make();
  object.convert(value);
  return value;
}

// True for types that msgpack writes as nil when they are empty.
template <class T>
constexpr bool kMayBeNil = false;
template <class T>
constexpr bool kMayBeNil<std::optional<T>> = true;
template <class T>
constexpr bool kMayBeNil<std::shared_ptr<T>> = true;
template <class T>
constexpr bool kMayBeNil<std::unique_ptr<T>> = true;

template <class Outer>
struct PackWithin {
  Packer& operator()(Packer& packer, const Outer& outer) const {
    if (!outer) return packer.pack_nil();
    return packer.pack_array(1).pack(*outer);
  }
};
// Returns the object that PackWithin has wrapped; null for nil.
inline const msgpack::object* within(const msgpack::object& object) {
  if (object.is_nil()) return nullptr;
  if (object.type != msgpack::type::ARRAY || object.via.array.size != 1)
    throw msgpack::type_error();
  return object.via.array.ptr;
}

// Converts an array into any container.
template <class Container>
struct ConvertElements {
  const msgpack::object& operator()(const msgpack::object& object, Container& container) const {
    if (object.type != msgpack::type::ARRAY) throw msgpack::type_error();
    container.clear();
    for (const msgpack::object& element : std::span(object.via.array.ptr, object.via.array.size)) {
      container.insert(container.end(), unpacked<typename Container::value_type>(element));
    }
    return object;
  }
};

template <class Bytes>
struct ConvertBytes {
  const msgpack::object& operator()(const msgpack::object& object, Bytes& bytes) const {
    if (object.type != msgpack::type::BIN || object.via.bin.size != bytes.size())
      throw msgpack::type_error();
    std::memcpy(bytes.data(), object.via.bin.ptr, bytes.size());
    return object;
  }
};

template <class Map>
struct ConvertPairs {
  const msgpack::object& operator()(const msgpack::object& object, Map& map) const {
    if (object.type != msgpack::type::MAP) throw msgpack::type_error();
    map.clear();
    for (const msgpack::object_kv& pair : std::span(object.via.map.ptr, object.via.map.size)) {
      map.emplace(unpacked<typename Map::key_type>(pair.key),
                  unpacked<typename Map::mapped_type>(pair.val));
    }
    return object;
  }
};

}  // namespace weft::codec

// clang-format takes the macro for the head of a function.
// clang-format off
namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
namespace adaptor {

template <weft::codec::NeedsBlank T, class A>
struct convert<std::vector<T, A>> : weft::codec::ConvertElements<std::vector<T, A>> {};
template <weft::codec::NeedsBlank T, class A>
struct convert<std::deque<T, A>> : weft::codec::ConvertElements<std::deque<T, A>> {};
template <weft::codec::NeedsBlank T, class A>
struct convert<std::list<T, A>> : weft::codec::ConvertElements<std::list<T, A>> {};
template <weft::codec::NeedsBlank T, class Less, class A>
struct convert<std::set<T, Less, A>> : weft::codec::ConvertElements<std::set<T, Less, A>> {};
template <weft::codec::NeedsBlank T, class Less, class A>
struct convert<std::multiset<T, Less, A>> : weft::codec::ConvertElements<std::multiset<T, Less, A>> {};
template <weft::codec::NeedsBlank T, class Hash, class Equal, class A>
struct convert<std::unordered_set<T, Hash, Equal, A>>
    : weft::codec::ConvertElements<std::unordered_set<T, Hash, Equal, A>> {};
template <weft::codec::NeedsBlank T, class Hash, class Equal, class A>
struct convert<std::unordered_multiset<T, Hash, Equal, A>>
    : weft::codec::ConvertElements<std::unordered_multiset<T, Hash, Equal, A>> {};

template <class K, class V, class Less, class A>
requires(weft::codec::NeedsBlank<K> || weft::codec::NeedsBlank<V>)
struct convert<std::map<K, V, Less, A>> : weft::codec::ConvertPairs<std::map<K, V, Less, A>> {};
template <class K, class V, class Less, class A>
requires(weft::codec::NeedsBlank<K> || weft::codec::NeedsBlank<V>)
struct convert<std::multimap<K, V, Less, A>> : weft::codec::ConvertPairs<std::multimap<K, V, Less, A>> {};
template <class K, class V, class Hash, class Equal, class A>
requires(weft::codec::NeedsBlank<K> || weft::codec::NeedsBlank<V>)
struct convert<std::unordered_map<K, V, Hash, Equal, A>>
    : weft::codec::ConvertPairs<std::unordered_map<K, V, Hash, Equal, A>> {};
template <class K, class V, class Hash, class Equal, class A>
requires(weft::codec::NeedsBlank<K> || weft::codec::NeedsBlank<V>)
struct convert<std::unordered_multimap<K, V, Hash, Equal, A>>
    : weft::codec::ConvertPairs<std::unordered_multimap<K, V, Hash, Equal, A>> {};

// The number of elements must match; msgpack would take fewer. Bytes, which msgpack packs as BIN,
// are copied all at once.
template <std::size_t elements>
requires(elements > 0)
struct convert<std::array<char, elements>> : weft::codec::ConvertBytes<std::array<char, elements>> {};
template <std::size_t elements>
requires(elements > 0)
struct convert<std::array<unsigned char, elements>> : weft::codec::ConvertBytes<std::array<unsigned char, elements>> {};
template <std::size_t elements>
requires(elements > 0)
struct convert<std::array<std::byte, elements>> : weft::codec::ConvertBytes<std::array<std::byte, elements>> {};
template <std::destructible T, std::size_t elements>
struct convert<T[elements]> {
  const msgpack::object& operator()(const msgpack::object& object, T (&array)[elements]) const {
    if (object.type != msgpack::type::ARRAY || object.via.array.size != elements) throw msgpack::type_error();
    for (std::size_t i = 0; i < elements; ++i) object.via.array.ptr[i].convert(array[i]);
    return object;
  }
};
template <std::destructible T, std::size_t elements>
struct convert<std::array<T, elements>> {
  const msgpack::object& operator()(const msgpack::object& object, std::array<T, elements>& array) const {
    if (object.type != msgpack::type::ARRAY || object.via.array.size != elements) throw msgpack::type_error();
    for (std::size_t i = 0; i < elements; ++i) object.via.array.ptr[i].convert(array[i]);
    return object;
  }
};
// Also for types that msgpack's own adaptor would copy.
template <class T>
requires(!weft::codec::kMayBeNil<T> && (weft::codec::NeedsBlank<T> || !std::is_copy_constructible_v<T> ||
                                        !std::is_copy_assignable_v<T>))
struct convert<std::optional<T>> {
  const msgpack::object& operator()(const msgpack::object& object, std::optional<T>& value) const {
    value.reset();
    if (!object.is_nil()) value.emplace(weft::codec::unpacked<T>(object));
    return object;
  }
};

// nil means an empty value, so a value that may be nil itself is wrapped in an array of one
// element.
template <class T>
requires weft::codec::kMayBeNil<T>
struct pack<std::optional<T>> : weft::codec::PackWithin<std::optional<T>> {};
template <class T>
requires weft::codec::kMayBeNil<T>
struct pack<std::shared_ptr<T>> : weft::codec::PackWithin<std::shared_ptr<T>> {};
template <class T>
requires weft::codec::kMayBeNil<T>
struct pack<std::unique_ptr<T>> : weft::codec::PackWithin<std::unique_ptr<T>> {};
template <class T>
requires weft::codec::kMayBeNil<T>
struct convert<std::optional<T>> {
  const msgpack::object& operator()(const msgpack::object& object, std::optional<T>& value) const {
    value.reset();
    if (const auto* within = weft::codec::within(object)) value.emplace(weft::codec::unpacked<T>(*within));
    return object;
  }
};
template <class T>
requires weft::codec::kMayBeNil<T>
struct convert<std::shared_ptr<T>> {
  const msgpack::object& operator()(const msgpack::object& object, std::shared_ptr<T>& value) const {
    value.reset();
    if (const auto* within = weft::codec::within(object)) value = std::make_shared<T>(weft::codec::unpacked<T>(*within));
    return object;
  }
};
template <class T>
requires weft::codec::kMayBeNil<T>
struct convert<std::unique_ptr<T>> {
  const msgpack::object& operator()(const msgpack::object& object, std::unique_ptr<T>& value) const {
    value.reset();
    if (const auto* within = weft::codec::within(object)) value = std::make_unique<T>(weft::codec::unpacked<T>(*within));
    return object;
  }
};

}  // namespace adaptor
}
}  // namespace msgpack
// clang-format on
