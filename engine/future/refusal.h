// Refusals: mistakes in uses of the typed API that the compiler answers with one error, of one
// sentence, on the user's line. Each is a struct whose accept() holds the sentence:
//
//   template <class... About>
//   struct HasNoFields : Refusal {
//     static constexpr bool accept() {
//       static_assert(kNever<About...>, "a value of this type cannot travel: …");
//       return false;
//     }
//   };
//
// A function template that users call looks for a refusal first, and compiles nothing else where it
// finds one:
//
//   template <class T>
//   std::vector<std::byte> encode(const T& value) {
//     if constexpr (decltype(refusal_of<T>())::accept()) {
//       …
//
// Three rules keep the output short. Finding the refusal causes no error. The user's function calls
// accept() itself, since a compiler prints three lines for each call between them. Its return type
// is written down, so that the lines of the program that use the result have no errors of their
// own.
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

// The first that is a refusal; Fine if none is.
consteval Fine first_of() { return {}; }
template <class First, class... More>
consteval auto first_of(First, More... more) {
  if constexpr (First::fine) {
    return first_of(more...);
  } else {
    return First();
  }
}

// The same about one thing more: what is refused in two places is reported for each of them.
template <class More>
consteval Fine about(Fine) {
  return {};
}
template <class More, template <class...> class Mistake, class... About>
consteval auto about(Mistake<About...>) {
  return Mistake<About..., More>();
}

// The result of a refused call whose function does not show a type: it converts to whatever the
// program takes it for.
struct Refused {
  template <class T>
  operator T() const;
};

}  // namespace weft::detail
