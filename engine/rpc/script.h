// SPDX-License-Identifier: Apache-2.0
// TorchScript called by name: functions that torch::jit::compile() has made from source, and
// methods of modules that Python has saved and torch::jit::load() reads. No code is sent: a worker
// runs the scripts that its program has exposed.
//
//   const char* source = "def scale(x, by: float = 2.0):\n  return x * by\n";
//   rpc::expose_script("math", torch::jit::compile(source));
//   rpc::expose_script("net", torch::jit::load("net.pt"));
//   at::Tensor y = agent.sync_script("math.scale", "worker1", x, rpc::keyword("by", 3.0));
//   double loss = agent.sync_script<double>("net.loss", "worker1", x);
//
// The callee checks the arguments against its schema, which has the defaults; an int is taken for a
// float. The call of a script that returns a Future (fork) is answered when that is done, and holds
// no thread meanwhile. Calls of one module run beside each other. An error that a script raises
// arrives as a RemoteError with TorchScript's traceback.
//
// PyTorch has deprecated TorchScript (its documentation says so since release 2.5). sync_script()
// and expose_script() stay while libtorch has torch::jit; nothing else of Weft uses TorchScript. In
// new programs call C++ functions: agent.sync<&f>("worker1", x).
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/export.h>
#include <weft/engine/codec/values.h>
#include <weft/engine/future/future.h>
#include <weft/engine/rpc/operators.h>
#include <weft/engine/tensor/each_tensor.h>

namespace torch::jit {
struct CompilationUnit;
struct Module;
}  // namespace torch::jit

namespace weft::rpc {

// Makes each function of the unit, or each method of the module, callable as "name.function" on all
// workers of this process, until it ends. Call it before init(), because others may call at once
// after that. Usable from every thread. The same scripts again do nothing. Throws Caller if
// something else has the name, or if the name is empty or has a '.'.
WEFT_API void expose_script(const std::string& name,
                            std::shared_ptr<torch::jit::CompilationUnit> functions);
// The same for the methods of a module.
WEFT_API void expose_script(const std::string& name, const torch::jit::Module& module);

// A value that a script takes or returns: a value of operators, or a List, a Tuple, or a Dict as a
// list of pairs.
struct ScriptValue {
  // One value, or the elements of a List, Tuple or Dict.
  std::variant<OperatorValue, std::vector<ScriptValue>> value;
  WEFT_FIELDS(value)
};

// An argument by its name.
struct Keyword {
  // The name of the argument in the schema.
  std::string name;
  // The argument.
  ScriptValue value;
};

// The arguments of a script: by position, and by name.
struct WEFT_API ScriptArguments {
  // The arguments by position.
  std::vector<ScriptValue> positional;
  // The arguments by name.
  std::map<std::string, ScriptValue> keywords;
  WEFT_FIELDS(positional, keywords)

  void add(ScriptValue argument) { positional.push_back(std::move(argument)); }
  // Throws Caller if there is one of that name already.
  void add(Keyword argument);
};

namespace detail {

template <class A>
constexpr bool is_operator_value =
    std::is_arithmetic_v<A> || std::is_same_v<A, c10::ScalarType> ||
    std::is_same_v<A, c10::Layout> || std::is_same_v<A, std::nullopt_t> ||
    std::is_constructible_v<std::string, A> || std::is_constructible_v<OperatorValue, A>;

template <class T>
constexpr bool is_optional = false;
template <class T>
constexpr bool is_optional<std::optional<T>> = true;

template <class... About>
struct IsNoScriptValue : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "a script takes tensors, numbers, strings, devices, dtypes, and optionals, "
                  "vectors, tuples and maps of "
                  "those");
    return false;
  }
};
template <class... About>
struct IsNoScriptResult : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "a script's result is a tensor, a number, a bool, a std::string, or an optional, "
                  "vector, tuple or map of "
                  "those; rpc::ScriptValue takes whatever it is; void drops it");
    return false;
  }
};

// Finds why a script does not take an A.
template <class A>
consteval auto refusal_of_script_value();
template <class... A>
consteval auto refusal_of_script_values() {
  return weft::detail::first_of(refusal_of_script_value<std::remove_cvref_t<A>>()...);
}
template <class A>
consteval auto refusal_of_script_value() {
  if constexpr (std::is_same_v<A, ScriptValue> || std::is_same_v<A, Keyword> ||
                is_operator_value<A>) {
    return weft::detail::Fine();
  } else if constexpr (is_optional<A> || weft::detail::Range<A>) {
    return refusal_of_script_value<std::remove_cvref_t<typename A::value_type>>();
  } else if constexpr (weft::detail::TupleLike<A>) {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return refusal_of_script_values<std::tuple_element_t<i, A>...>();
    }
    (std::make_index_sequence<std::tuple_size_v<A>>());
  } else {
    return IsNoScriptValue<A>();
  }
}

template <class A>
ScriptValue script_value(A&& argument) {
  using T = std::remove_cvref_t<A>;
  if constexpr (std::is_same_v<T, ScriptValue>) {
    return std::forward<A>(argument);
  } else if constexpr (is_optional<T>) {
    return argument ? script_value(*argument) : ScriptValue{};
  } else if constexpr (is_operator_value<T>) {
    return {operator_value(std::forward<A>(argument))};
  } else if constexpr (weft::detail::TupleLike<T>) {
    return {std::apply(
        [](const auto&... one) { return std::vector<ScriptValue>{script_value(one)...}; },
        argument)};
  } else {
    std::vector<ScriptValue> all;
    for (const auto& one : argument)
      all.push_back(script_value(static_cast<const typename T::value_type&>(one)));
    return {std::move(all)};
  }
}

// Reads the result of a script as a T; nullopt if it is of another type.
template <class T>
struct Given {
  using Refusal =
      std::conditional_t<std::is_integral_v<T> || std::is_constructible_v<OperatorValue, T>,
                         weft::detail::Fine, IsNoScriptResult<T>>;
  static std::optional<T> read(const ScriptValue& given) {
    constexpr bool is_number = std::is_integral_v<T> && !std::is_same_v<T, bool>;
    using Held = std::conditional_t<is_number, std::int64_t,
                                    std::conditional_t<std::is_floating_point_v<T>, double, T>>;
    const auto* leaf = std::get_if<OperatorValue>(&given.value);
    const auto* held = leaf == nullptr ? nullptr : std::get_if<Held>(leaf);
    if (held == nullptr) return std::nullopt;
    if constexpr (is_number) {
      if (!std::in_range<T>(*held)) return std::nullopt;
    }
    return static_cast<T>(*held);
  }
};
template <>
struct Given<void> {
  using Refusal = weft::detail::Fine;
};
template <>
struct Given<ScriptValue> {
  using Refusal = weft::detail::Fine;
  static std::optional<ScriptValue> read(const ScriptValue& given) { return given; }
};
template <class T>
struct Given<std::optional<T>> {
  using Refusal = typename Given<T>::Refusal;
  static std::optional<std::optional<T>> read(const ScriptValue& given) {
    const auto* leaf = std::get_if<OperatorValue>(&given.value);
    if (leaf != nullptr && std::holds_alternative<std::monostate>(*leaf)) return std::optional<T>();
    auto held = Given<T>::read(given);
    return held ? std::optional<std::optional<T>>(std::move(held)) : std::nullopt;
  }
};
template <class T>
struct Given<std::vector<T>> {
  using Refusal = typename Given<T>::Refusal;
  static std::optional<std::vector<T>> read(const ScriptValue& given) {
    const auto* list = std::get_if<std::vector<ScriptValue>>(&given.value);
    if (list == nullptr) return std::nullopt;
    std::vector<T> all;
    for (const ScriptValue& one : *list) {
      auto held = Given<T>::read(one);
      if (!held) return std::nullopt;
      all.push_back(std::move(*held));
    }
    return all;
  }
};
template <class... T>
struct Given<std::tuple<T...>> {
  using Refusal = decltype(weft::detail::first_of(typename Given<T>::Refusal()...));
  static std::optional<std::tuple<T...>> read(const ScriptValue& given) {
    const auto* list = std::get_if<std::vector<ScriptValue>>(&given.value);
    if (list == nullptr || list->size() != sizeof...(T)) return std::nullopt;
    return [&]<std::size_t... i>(std::index_sequence<i...>)->std::optional<std::tuple<T...>> {
      auto held = std::make_tuple(Given<T>::read((*list)[i])...);
      if (!(std::get<i>(held) && ...)) return std::nullopt;
      return std::tuple<T...>(std::move(*std::get<i>(held))...);
    }
    (std::index_sequence_for<T...>());
  }
};
template <class A, class B>
struct Given<std::pair<A, B>> : Given<std::tuple<A, B>> {
  static std::optional<std::pair<A, B>> read(const ScriptValue& given) {
    auto held = Given<std::tuple<A, B>>::read(given);
    if (!held) return std::nullopt;
    return std::pair<A, B>(std::move(std::get<0>(*held)), std::move(std::get<1>(*held)));
  }
};
template <class Map>
std::optional<Map> read_map(const ScriptValue& given) {
  auto pairs =
      Given<std::vector<std::pair<typename Map::key_type, typename Map::mapped_type>>>::read(given);
  if (!pairs) return std::nullopt;
  return Map(std::make_move_iterator(pairs->begin()), std::make_move_iterator(pairs->end()));
}
template <class K, class V>
struct Given<std::map<K, V>> : Given<std::tuple<K, V>> {
  static std::optional<std::map<K, V>> read(const ScriptValue& given) {
    return read_map<std::map<K, V>>(given);
  }
};
template <class K, class V>
struct Given<std::unordered_map<K, V>> : Given<std::tuple<K, V>> {
  static std::optional<std::unordered_map<K, V>> read(const ScriptValue& given) {
    return read_map<std::unordered_map<K, V>>(given);
  }
};

// Finds why a script cannot be called with A… for an R.
template <class R, class... A>
using RefusalOfScript = decltype(weft::detail::first_of(typename Given<R>::Refusal(),
                                                        refusal_of_script_values<A...>()));

// Receives the result of a script: one of the two functions is called, once, on the thread that
// ends it.
struct ScriptCompletion {
  const std::type_info& type;  // the type that the caller asks for
  // Returns false, and does nothing, if the result is of another type.
  std::function<bool(const ScriptValue& given)> take;
  std::function<void(const std::exception_ptr& error)> fail;
};

template <class R>
ScriptCompletion completes(const Promise<R>& promise) {
  return {typeid(R),
          [promise]([[maybe_unused]] const ScriptValue& given) {
            if constexpr (std::is_void_v<R>) {
              promise.set();
            } else {
              auto held = Given<R>::read(given);
              if (!held) return false;
              promise.set(std::move(*held));
            }
            return true;
          },
          [promise](const std::exception_ptr& error) { promise.set_error(error); }};
}

// Both throw if the name or the arguments are wrong.
WEFT_API void start_script(const std::string& name, const ScriptArguments& arguments,
                           const ScriptCompletion& completion);
WEFT_API void start_method(const torch::jit::Module& module, const std::string& method,
                           const ScriptArguments& arguments, const ScriptCompletion& completion);

}  // namespace detail

// Makes an argument that is passed by its name.
template <class A>
Keyword keyword(std::string name, A&& value) {
  if constexpr (detail::RefusalOfScript<void, A>::accept()) {
    return {std::move(name), detail::script_value(std::forward<A>(value))};
  } else {
    std::terminate();
  }
}

// Values by their place, and keywords.
template <class... A>
ScriptArguments script_arguments(A&&... arguments) {
  ScriptArguments all;
  if constexpr (detail::RefusalOfScript<void, A...>::accept()) {
    [[maybe_unused]] const auto add = [&]<class T>(T&& argument) {
      if constexpr (std::is_same_v<std::remove_cvref_t<T>, Keyword>) {
        all.add(Keyword(std::forward<T>(argument)));
      } else {
        all.add(detail::script_value(std::forward<T>(argument)));
      }
    };
    (add(std::forward<A>(arguments)), ...);
  }
  return all;
}

// Runs the script in a call: agent.sync_script<R> calls this on the callee. Throws Caller if
// nothing of that name is exposed (the error lists the exposed scripts), if it takes other
// arguments (the error has its schema), or if it returns anything but an R. A program that exposes
// scripts serves R = void, at::Tensor, bool, int, std::int64_t, double, std::string, vectors of
// these except bool, and ScriptValue. For clients that are other programs and ask for other types:
// rpc::expose<&rpc::run_script<R>>().
template <class R>
WEFT_API Future<R> run_script(std::string name, ScriptArguments arguments) {
  Promise<R> promise;
  detail::start_script(name, arguments, detail::completes(promise));
  return promise.future();
}

// Runs a method of a module behind an RRef<torch::jit::Module>, which a function that returns one
// has made there: net.sync<&rpc::run_method<at::Tensor>>("forward", rpc::script_arguments(x)).
template <class R>
WEFT_API Future<R> run_method(torch::jit::Module& module, std::string method,
                              ScriptArguments arguments) {
  Promise<R> promise;
  detail::start_method(module, method, arguments, detail::completes(promise));
  return promise.future();
}

}  // namespace weft::rpc
