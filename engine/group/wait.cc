// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/group/wait.h>

namespace weft::group {

std::string called_as(const char* name, const char* called_by) {
  return called_by == nullptr ? name : std::string(called_by) + ": " + name;
}

std::string Wait::operation() const {
  if (collective == 0)
    return std::string(name) + (peer < 0 ? " any rank" : " rank " + std::to_string(peer));
  return called_as(name, called_by);
}

std::string Wait::what() const {
  return operation() + (collective == 0 ? "" : " #" + std::to_string(collective));
}

}  // namespace weft::group
