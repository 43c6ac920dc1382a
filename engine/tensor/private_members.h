// SPDX-License-Identifier: Apache-2.0
// Members that libtorch declares protected or private and gives no function for. An explicit
// instantiation may name them ([temp.spec.general]):
//
//   namespace weft::x { namespace { struct Count; } }  // any incomplete type, as the member's name
//   template struct weft::tensor::Reveal<weft::x::Count, &c10::Class::count_>;  // in no namespace
//   object.*tensor::revealed<Count>() = 1;
#pragma once

namespace weft::tensor {

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wnon-template-friend"  // Reveal defines one for each name
#endif
template <class Name>
struct Hidden {
  friend auto pointer_of(Hidden);
};
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

template <class Name, auto member>
struct Reveal {
  friend auto pointer_of(Hidden<Name>) { return member; }
};

// The pointer to the member.
template <class Name>
auto revealed() {
  return pointer_of(Hidden<Name>());
}

}  // namespace weft::tensor
