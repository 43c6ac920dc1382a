// SPDX-License-Identifier: Apache-2.0
// The backends of this build: a table that CMake generates from the folders of transport/.
#pragma once

#include <span>
#include <string_view>

#include <weft/transport/transport.h>

namespace weft::transport {

struct Backend {
  std::string_view name;
  Open open;
};

std::span<const Backend> backends();

// The folders of transport/ that are not built into this build or program.
struct LeftOut {
  std::string_view name;
  std::string_view why;
};

std::span<const LeftOut> left_out();

// Opens a backend by name. Throws Caller if this build does not have it; the text lists the
// backends that it has and says why this one is missing. Throws Unsupported, with the reason, if it
// cannot be used here.
std::shared_ptr<Transport> open(std::string_view name);

}  // namespace weft::transport
