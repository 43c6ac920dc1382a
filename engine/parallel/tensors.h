// Visits every tensor inside a value: tensors, optionals, pairs, tuples, arrays, vectors, maps, variants, however nested.
// DistributedDataParallel finds with it what a forward pass returned.
#pragma once

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/core/Tensor.h>

namespace weft::parallel {

template <class T>
concept Range = requires(T& value) {
  value.begin();
  value.end();
};
template <class T>
concept TupleLike = requires {
  std::tuple_size<std::remove_cvref_t<T>>::value;
};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsVariant : std::false_type {};
template <class... T>
struct IsVariant<std::variant<T...>> : std::true_type {};
// A struct says by itself what it holds: void visit_tensors(auto&& visit) { visit(a); visit(b); }
template <class T, class F>
concept Visitable = requires(T& value, F& visit) {
  value.visit_tensors(visit);
};

// Calls visit(at::Tensor&) on each. Values that hold no tensors are passed over; a struct takes part when it has a member
// visit_tensors(visit) that calls visit on each of its members.
template <class T, class F>
void for_each_tensor(T& value, F&& visit) {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (IsOptional<Value>::value) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (IsVariant<Value>::value) {
    std::visit([&](auto& held) { for_each_tensor(held, visit); }, value);
  } else if constexpr (Range<Value>) {
    for (auto& item : value) for_each_tensor(item, visit);
  } else if constexpr (TupleLike<Value>) {
    std::apply([&](auto&... items) { (for_each_tensor(items, visit), ...); }, value);
  } else {
    auto inner = [&](auto& item) { for_each_tensor(item, visit); };
    if constexpr (Visitable<Value, decltype(inner)>) value.visit_tensors(inner);
  }
}

}  // namespace weft::parallel
