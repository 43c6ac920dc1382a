// Where tests listen: WEFT_TEST_INTERFACE puts a real link between two ends of one machine
// (tests/guest).
#pragma once

#include <cstdlib>
#include <string>

namespace weft::harness {

inline std::string interface_or(const std::string& otherwise) {
  const char* const given = std::getenv("WEFT_TEST_INTERFACE");
  return given == nullptr ? otherwise : given;
}

}  // namespace weft::harness
