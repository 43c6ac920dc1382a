// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/registry.h>

namespace weft::transport {

std::shared_ptr<Transport> open(std::string_view name) {
  std::string known;
  for (const Backend& backend : backends()) {
    if (backend.name == name) {
      auto opened = backend.open();
      if (!opened)
        throw opened.error().within("backend '" + std::string(name) + "' cannot be used here");
      return std::move(opened).value();
    }
    known += (known.empty() ? "" : ", ") + std::string(backend.name);
  }
  std::string why;
  for (const LeftOut& one : left_out()) {
    if (one.name == name) why = " (" + std::string(one.why) + ")";
  }
  throw Error(Blame::Caller,
              "no backend '" + std::string(name) + "' in this build" + why + "; it has: " + known);
}

}  // namespace weft::transport
