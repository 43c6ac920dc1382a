// SPDX-License-Identifier: Apache-2.0
// Refusals: misuses of the typed API, each of which the compiler reports as one error, of one
// sentence, on the user's line. Each is a struct whose accept() has the sentence:
//
//   template <class... About>
//   struct HasNoFields : Refusal {
//     static constexpr bool accept() {
//       static_assert(kNever<About...>, "a value of this type cannot travel: …");
//       return false;
//     }
//   };
//
// A function template that users call looks for a refusal first, and compiles nothing else if it
// finds one:
//
//   template <class T>
//   std::vector<std::byte> encode(const T& value) {
//     if constexpr (decltype(refusal_of<T>())::accept()) {
//       …
//
// Three rules keep the output short. Looking for a refusal causes no error. The user's function
// calls accept() itself, since a compiler prints three lines for each call between them. Its return
// type is written down, so that the user's lines that use the result have no errors of their own.
#pragma once

#include <exception>

namespace weft::detail {

template <class...>
constexpr bool kNever = false;

struct Refusal {
  static constexpr bool fine = false;
};
// No mistake.
struct Fine {
  static constexpr bool fine = true;
  static constexpr bool accept() { return true; }
};

// The first argument that is a refusal; Fine if there is none.
consteval Fine first_of() { return {}; }
template <class First, class... More>
consteval auto first_of(First, More... more) {
  if constexpr (First::fine) {
    return first_of(more...);
  } else {
    return First();
  }
}

// The same refusal about one more type, so that each place that refuses it gets its own error.
template <class More>
consteval Fine about(Fine) {
  return {};
}
template <class More, template <class...> class Mistake, class... About>
consteval auto about(Mistake<About...>) {
  return Mistake<About..., More>();
}

// The result of a refused call whose function does not determine a type. It converts to any type
// that the program expects.
struct Refused {
  template <class T>
  operator T() const;
};

}  // namespace weft::detail
