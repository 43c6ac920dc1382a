// SPDX-License-Identifier: Apache-2.0
// The identity of a function between processes: its qualified name with template arguments, as a
// reader would write it, and its signature, as the C++ ABI spells it. g++ and clang spell both
// alike. A function enters this process's table when the program starts, if anything in the program
// calls it remotely or exposes it. No other function can be called.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <weft/base/export.h>
#include <weft/engine/call/refusals.h>
#include <weft/engine/codec/values.h>
#include <weft/engine/future/future.h>

namespace weft::call {

class IncomingCall;

// Identifies a function in messages by two hashes (hash_of()): of its name, and of its type's
// typeid(…).name(). The name has template arguments and no parameters, as __cxa_demangle writes it,
// but with "std::string", ">>" and without "[abi:cxx11]".
//
//   a function of                          name                    type
//   its own                                ns::f<int>              R(A…)
//   an RRef<M>, a method                   ns::M::f                R(weft::RRef<M>, A…)
//   an RRef<M>, a const method             ns::M::f                R(weft::RRef<M const>, A…)
//   an RRef<M>, one that takes M first     ns::f                   R(weft::RRef<M>, V, A…)
//   a constructor                          constructor of ns::M    M(A…)
//
// A… are the parameters without references and const, V is the value's as written (ns::M const&),
// and R is T for a Future<T>. If the result stays with the callee (remote()), and for constructors,
// "RRef " precedes the type's text. No type of Weft's own is in them, except those that users write
// and the functions that Weft calls itself.
struct Identity {
  std::uint64_t name = 0;
  std::uint64_t signature = 0;
  friend bool operator==(const Identity&, const Identity&) = default;
};

struct Function {
  Identity id;
  std::string name;       // "ns::add"
  std::string signature;  // "int (int, std::string)"
  // The function's address, to tell two functions of one identity apart.
  std::vector<std::byte> value;
  // Decodes the arguments and has the call start. Throws Caller if they cannot be decoded.
  using Serve = void (*)(const std::shared_ptr<IncomingCall>& call,
                         const msgpack::object& arguments);
  Serve serve = nullptr;
};

// Aborts if a different function already has this identity. Called before main(). Never null; it is
// a pointer because g++ takes a reference for one to the argument.
WEFT_API const Function* enter(Function function);
// Null if this process has no such function.
WEFT_API const Function* find(const Identity& id);
// The functions of the same name, to explain a mismatch of signatures.
WEFT_API std::vector<const Function*> named(std::uint64_t name);
// The function as errors, logs and traces show it. run_script() and the like run the function that
// their first text argument names, and are shown under that name. All others are shown as
// themselves; so are these if the text is no name, or if the process has already shown a thousand.
// Lives as long as the process.
WEFT_API const Function& shown_as(const Function& function, std::string_view text);
// The same for an incoming call: the text is in the message's body.
WEFT_API const Function& shown_as(const Function& function, std::span<const std::byte> body);

// Returns "ns::add" from the ABI's spelling of a type that has the function as its template
// argument. The parameters are left out.
WEFT_API std::string name_in(const std::type_info& tag);
// "int (int, std::string)".
WEFT_API std::string spelled(const std::type_info& type);
WEFT_API std::uint64_t hash_of(std::string_view text);

// Runs a short function on the callee's loop: agent.sync<inline_<&f>>(to, …). It must not block.
template <auto F>
struct Inline {};

}  // namespace weft::call

namespace weft::rpc {

// As a function to call: `F`, run on the callee's loop. F must be short and must not block.
template <auto F>
constexpr call::Inline<F> inline_{};

}  // namespace weft::rpc

namespace weft::call {
namespace detail {

// With `stays`, the result stays with the callee as the value of an RRef.
WEFT_API Function entry(std::string name, const std::type_info& signature, bool stays,
                        std::vector<std::byte> value, Function::Serve serve);

template <auto F>
struct Tag {};

// The parts of a function's type. M is void for a function that is not a member.
template <class R, class M, class... P>
struct Shape {
  using Returned = R;
  using Module = M;
  using Result = typename weft::detail::Flat<std::remove_cvref_t<R>>::Type;
  using Arguments = std::tuple<std::remove_cvref_t<P>...>;
  using Signature = Result(std::remove_cvref_t<P>...);
  static constexpr std::size_t arity = sizeof...(P);
  static constexpr bool deferred = is_future<std::remove_cvref_t<R>>;
  static consteval auto refusal() {
    return first_of(refusal_of_returned<Result, deferred>(), refusal_of_parameter<P>()...);
  }
};

// For types that are not functions.
template <class F>
struct ShapeOf {
  using Module = void;
  using Result = Refused;
  using Arguments = std::tuple<>;
  static consteval auto refusal() { return IsNoFunction<F>(); }
};
template <class R, class... P>
struct ShapeOf<R (*)(P...)> : Shape<R, void, P...> {};
template <class R, class... P>
struct ShapeOf<R (*)(P...) noexcept> : Shape<R, void, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...)> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...) const> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...) noexcept> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...) const noexcept> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...)&> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...) const&> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...)& noexcept> : Shape<R, M, P...> {};
template <class R, class M, class... P>
struct ShapeOf<R (M::*)(P...) const& noexcept> : Shape<R, M, P...> {};

template <auto F>
struct Named {
  static constexpr auto function = F;
  static constexpr bool on_loop = false;
};
template <auto F>
struct NamedInline {
  static constexpr auto function = F;
  static constexpr bool on_loop = true;
};
template <class T, T F>
struct Naming : Named<F> {};
template <auto G, Inline<G> F>
struct Naming<Inline<G>, F> : NamedInline<G> {};
template <auto F>
using NamingOf = Naming<std::remove_const_t<decltype(F)>, F>;
template <auto F>
using ResultOf = typename ShapeOf<std::remove_const_t<decltype(NamingOf<F>::function)>>::Result;

template <class T>
std::vector<std::byte> bytes_of(T value) {
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

template <class Tuple, std::size_t... i>
Tuple unpack_tuple(const msgpack::object& object, std::index_sequence<i...>) {
  if (object.type != msgpack::type::ARRAY || object.via.array.size != sizeof...(i))
    throw msgpack::type_error();
  return Tuple{codec::unpacked<std::tuple_element_t<i, Tuple>>(object.via.array.ptr[i])...};
}
template <class Tuple>
Tuple unpack_tuple(const msgpack::object& object) {
  return unpack_tuple<Tuple>(object, std::make_index_sequence<std::tuple_size_v<Tuple>>());
}

// Index of the first std::string in a tuple; the tuple's size if there is none.
template <class... A>
constexpr std::size_t first_text(std::type_identity<std::tuple<A...>>) {
  std::size_t place = 0;
  static_cast<void>((... || (std::is_same_v<A, std::string> || (++place, false))));
  return place;
}

template <class Tuple>
const Function& shown(const Function& function, const Tuple& arguments) {
  constexpr std::size_t place = first_text(std::type_identity<Tuple>());
  if constexpr (place < std::tuple_size_v<Tuple>) {
    return shown_as(function, std::get<place>(arguments));
  } else {
    return function;
  }
}

template <class Tuple>
void pack_tuple(codec::Packer& packer, const Tuple& values) {
  packer.pack_array(static_cast<std::uint32_t>(std::tuple_size_v<Tuple>));
  std::apply([&](const auto&... value) { (packer.pack(value), ...); }, values);
}

// Packs the result of a function or future; void is sent as nil.
template <class T>
void pack_result(codec::Packer& packer, const weft::detail::Stored<T>& value) {
  if constexpr (std::is_void_v<T>) {
    packer.pack_nil();
  } else {
    packer.pack(value);
  }
}
template <class T>
weft::detail::Stored<T> unpack_result(const msgpack::object& object) {
  if constexpr (std::is_void_v<T>) {
    if (!object.is_nil()) throw msgpack::type_error();
    return {};
  } else {
    return codec::unpacked<T>(object);
  }
}

}  // namespace detail
}  // namespace weft::call
