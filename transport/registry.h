// The backends of this build: a table that CMake generates from the folders under transport/.
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

// The folders under transport/ that this build, or this program, has no code of.
struct LeftOut {
  std::string_view name;
  std::string_view why;
};

std::span<const LeftOut> left_out();

// Opens one by name. Throws: Caller for a name that this build does not have (the text lists those
// it has, and says why it lacks that one), Unsupported with the reason where it cannot be used.
std::shared_ptr<Transport> open(std::string_view name);

}  // namespace weft::transport
