// Registered ATen operators, called by name: "aten::add". So overloaded functions of libtorch are
// called remotely without wrapping them; which overload runs is decided where it runs, by the
// arguments, as in Python. Those of aten that give tensors: none that is known to skip checks
// (operators.cc), and none that opens files.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <weft/base/export.h>
#include <weft/engine/codec/values.h>

namespace c10 {
struct IValue;
}

namespace weft::rpc {

// What an operator takes. std::monostate is None.
using OperatorValue = std::variant<std::monostate, at::Tensor, bool, std::int64_t, double,
                                   std::string, c10::Scalar, c10::Device, std::vector<std::int64_t>,
                                   std::vector<double>, std::vector<at::Tensor>>;

namespace detail {

template <class A>
OperatorValue operator_value(A&& argument) {
  using T = std::remove_cvref_t<A>;
  if constexpr (std::is_same_v<T, bool>) {
    return OperatorValue(std::in_place_type<bool>, argument);
  } else if constexpr (std::is_integral_v<T>) {
    return OperatorValue(std::in_place_type<std::int64_t>, static_cast<std::int64_t>(argument));
  } else if constexpr (std::is_floating_point_v<T>) {
    return OperatorValue(std::in_place_type<double>, static_cast<double>(argument));
  } else if constexpr (std::is_same_v<T, c10::ScalarType> || std::is_same_v<T, c10::Layout>) {
    return OperatorValue(std::in_place_type<std::int64_t>, static_cast<std::int64_t>(argument));
  } else if constexpr (std::is_same_v<T, std::nullopt_t>) {
    return OperatorValue(std::monostate());
  } else if constexpr (std::is_constructible_v<std::string, A&&>) {
    return OperatorValue(std::in_place_type<std::string>, std::forward<A>(argument));
  } else if constexpr (std::is_constructible_v<OperatorValue, A&&>) {
    return OperatorValue(std::forward<A>(argument));
  } else {
    static_assert(weft::detail::kNever<A>,
                  "an operator called by name takes tensors, numbers, strings, devices, dtypes, "
                  "and vectors of tensors or numbers");
    return {};
  }
}

WEFT_API c10::IValue to_ivalue(const OperatorValue& value);

}  // namespace detail

// Runs it here. Throws Caller where no operator has the name, or it is none that is called by name,
// or none of that name takes the arguments, listing those that it has; or gives anything but
// tensors.
WEFT_API at::Tensor run_operator(std::string name, std::vector<OperatorValue> arguments);
// For those that give several tensors, or a list.
WEFT_API std::vector<at::Tensor> run_operator_for_list(std::string name,
                                                       std::vector<OperatorValue> arguments);

}  // namespace weft::rpc
