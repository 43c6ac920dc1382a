// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/engine/checkpoint/save_arguments.h>

namespace weft::checkpoint {

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

void refuse_ambiguous(const std::vector<std::string>& names) {
  for (const std::string& one : names) {
    for (const std::string& other : names) {
      if (!other.starts_with(one + ".")) continue;
      throw Error(Blame::Caller, "the values of the part '" + other +
                                     "' would have names like those of '" + one +
                                     "'; rename one of them");
    }
  }
}

void check_options(const SaveOptions& options) {
  if (options.keep >= 1) return;
  throw Error(Blame::Caller, "SaveOptions::keep is " + std::to_string(options.keep) +
                                 "; keep at least 1 checkpoint");
}

}  // namespace weft::checkpoint
