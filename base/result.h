// SPDX-License-Identifier: Apache-2.0
// Either a value or an Error, for calls that fail in ordinary operation (parsing a peer's bytes).
// value() throws the error.
#pragma once

#include <utility>
#include <variant>

#include <weft/base/error.h>

namespace weft {

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }

  T& value() & {
    require();
    return std::get<0>(state_);
  }
  const T& value() const& {
    require();
    return std::get<0>(state_);
  }
  T&& value() && {
    require();
    return std::get<0>(std::move(state_));
  }
  // Only when !ok().
  const Error& error() const { return std::get<1>(state_); }

 private:
  void require() const {
    if (!ok()) throw error();
  }
  std::variant<T, Error> state_;
};

}  // namespace weft
