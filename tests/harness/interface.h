// SPDX-License-Identifier: Apache-2.0
// The interface on which tests listen. With WEFT_TEST_INTERFACE, the two ends on one machine
// communicate over a real link (tests/guest).
#pragma once

#include <cstdlib>
#include <string>

namespace weft::harness {

inline std::string interface_or(const std::string& otherwise) {
  const char* const given = std::getenv("WEFT_TEST_INTERFACE");
  return given == nullptr ? otherwise : given;
}

}  // namespace weft::harness
