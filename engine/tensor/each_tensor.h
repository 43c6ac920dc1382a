// SPDX-License-Identifier: Apache-2.0
// Visits every tensor inside a value: tensors, optionals, pairs, tuples, arrays, containers,
// variants, structs, however nested. DistributedDataParallel uses it to find the outputs of a
// forward pass, a future to find the tensors that its value waits for.
#pragma once

#include <iterator>
#include <tuple>
#include <type_traits>
#include <variant>

namespace at {
class Tensor;
}

namespace weft::detail {

template <class T>
concept Range = requires(T& value) {
  std::begin(value);
  std::end(value);
};
template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept VariantLike = requires {
  std::variant_size<T>::value;
};
template <class T>
concept OptionalLike = requires(T& value) {
  value.has_value();
  *value;
};
// A struct names its members by WEFT_FIELDS, or by a member function:
//   void visit_tensors(auto&& visit) { visit(a); visit(b); }
template <class T>
concept HasFields = requires(const T& value) {
  value.weft_fields();
};
template <class T, class F>
concept Visitable = requires(T& value, F& visit) {
  value.visit_tensors(visit);
};

// Calls visit(at::Tensor&) on each tensor, or visit(const at::Tensor&) if `value` is const. Skips
// values that hold no tensors.
template <class T, class F>
void for_each_tensor(T& value, F&& visit) {
  using Value = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (std::is_scalar_v<Value>) {
  } else if constexpr (HasFields<Value>) {
    const auto fields = value.weft_fields();
    for_each_tensor(fields, visit);
  } else if constexpr (OptionalLike<Value>) {
    if (value.has_value()) for_each_tensor(*value, visit);
  } else if constexpr (VariantLike<Value>) {
    if (!value.valueless_by_exception())
      std::visit([&](auto& held) { for_each_tensor(held, visit); }, value);
  } else if constexpr (Range<Value>) {
    using Item = std::remove_cvref_t<decltype(*std::begin(value))>;
    if constexpr (!std::is_scalar_v<Item> && !std::is_same_v<Item, Value>) {
      for (auto&& item : value) for_each_tensor(item, visit);
    }
  } else if constexpr (TupleLike<Value>) {
    std::apply([&](auto&... items) { (for_each_tensor(items, visit), ...); }, value);
  } else {
    auto inner = [&](auto& item) { for_each_tensor(item, visit); };
    if constexpr (Visitable<T, decltype(inner)>) value.visit_tensors(inner);
  }
}

}  // namespace weft::detail
