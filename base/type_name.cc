// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <memory>

#include <cxxabi.h>

#include <weft/base/type_name.h>

namespace weft {

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : type.name();
}

}  // namespace weft
