// SPDX-License-Identifier: Apache-2.0
// Registered ATen operators, called by name ("aten::add"), so that overloaded functions of libtorch
// can be called remotely without wrappers. The callee chooses the overload by the arguments, as
// Python does. Served are operators of aten that return tensors, except those that are known to
// skip checks (operators.cc) or that open files.
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

// An argument of an operator. std::monostate is None.
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

// For Weft's own use: runs the operator here. Throws Caller if no operator has the name, if it is
// not served by name, if no overload takes the arguments (the error lists the overloads), or if it
// returns anything but a tensor.
WEFT_API at::Tensor run_operator(std::string name, std::vector<OperatorValue> arguments);
// The same for operators that return several tensors, or a list.
WEFT_API std::vector<at::Tensor> run_operator_for_list(std::string name,
                                                       std::vector<OperatorValue> arguments);

}  // namespace weft::rpc
