// What a process can do that has run out of something.
#pragma once

#include <string>

namespace weft {

// " (this process may have 64 descriptors open: …)" for EMFILE, "" for other numbers. Errors of system_error() have it.
std::string remedy_for(int number);

}  // namespace weft
