// SPDX-License-Identifier: Apache-2.0
// Errors for futures, and the texts of errors that they throw.
#pragma once

#include <exception>
#include <string>

#include <weft/error.h>

namespace weft {

inline std::exception_ptr failure(const std::string& text) {
  return std::make_exception_ptr(Error(Blame::Remote, text));
}

template <class F>
std::string text_of(F call) {
  try {
    call();
  } catch (const Error& error) {
    return error.text();
  }
  return "no error";
}

}  // namespace weft
