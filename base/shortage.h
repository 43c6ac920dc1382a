// Tells a process that has run out of a resource which one, and how to get more.
#pragma once

#include <string>

namespace weft {

// " (this process may have 64 descriptors open: …)" for EMFILE, "" for other numbers. Errors of system_error() have it.
std::string remedy_for(int number);

}  // namespace weft
