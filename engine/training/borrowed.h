// SPDX-License-Identifier: Apache-2.0
// Decides by type which arguments checkpointed() cannot keep: those that show memory which the
// caller owns. In backward that memory may be gone, and what is put into it before would change the
// caller's tensors. Internal.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include <c10/util/ArrayRef.h>

#include <weft/engine/tensor/each_tensor.h>

namespace c10 {
template <class T>
class IListRef;
}

namespace weft::training::detail {

template <class T>
constexpr bool kIsView = false;
template <class C, class Traits>
constexpr bool kIsView<std::basic_string_view<C, Traits>> = true;
template <class E, std::size_t extent>
constexpr bool kIsView<std::span<E, extent>> = true;
template <class E>
constexpr bool kIsView<c10::ArrayRef<E>> = true;
template <class E>
constexpr bool kIsView<c10::IListRef<E>> = true;
template <class E>
constexpr bool kIsView<std::initializer_list<E>> = true;
template <class T>
constexpr bool kIsView<std::reference_wrapper<T>> = true;
// A pointer to another object is a decision of the program, which has to keep the object.
template <class T>
constexpr bool kIsView<T*> = std::is_scalar_v<T> || std::is_same_v<std::remove_cv_t<T>, at::Tensor>;

template <class T>
consteval bool borrows();
// std::tie() makes a tuple of references.
template <class T>
constexpr bool kIsBorrowedPart = std::is_reference_v<T> || borrows<std::remove_cv_t<T>>();
template <template <class...> class Holder, class... T>
consteval bool borrows_part(std::type_identity<Holder<T...>>) {
  return (kIsBorrowedPart<T> || ...);
}
template <class T>
concept HasParts = (weft::detail::VariantLike<T> || weft::detail::TupleLike<T>)&&requires {
  borrows_part(std::type_identity<T>());
};
template <class... T>
consteval bool borrows_field(std::type_identity<std::tuple<T...>>) {
  return (borrows<std::remove_cvref_t<T>>() || ...);
}

// True if a T is a view, or holds one where for_each_tensor() would look.
template <class T>
consteval bool borrows() {
  if constexpr (kIsView<T>) {
    return true;
  } else if constexpr (std::is_scalar_v<T>) {
    return false;
  } else if constexpr (weft::detail::HasFields<T>) {
    return borrows_field(std::type_identity<decltype(std::declval<T&>().weft_fields())>());
  } else if constexpr (weft::detail::OptionalLike<T>) {
    return borrows<std::remove_cvref_t<decltype(*std::declval<T&>())>>();
  } else if constexpr (weft::detail::Range<T>) {
    using Item = std::remove_cvref_t<decltype(*std::begin(std::declval<T&>()))>;
    if constexpr (std::is_same_v<Item, T>) {
      return false;
    } else {
      return borrows<Item>();
    }
  } else if constexpr (HasParts<T>) {
    return borrows_part(std::type_identity<T>());
  } else {
    return false;
  }
}

// `Argument`: as a forwarding reference deduces it. A text in quotation marks lives as long as the
// program.
template <class Argument>
constexpr bool kIsBorrowed =
    !std::is_same_v<std::remove_extent_t<std::remove_reference_t<Argument>>, const char> &&
    borrows<std::decay_t<Argument>>();

}  // namespace weft::training::detail
