// What a long run must not leave behind in this process.
#pragma once

#include <cstddef>

namespace weft::harness {

// Bytes that the program has allocated and not given back. (Not the resident set: that of a
// sanitizer only grows.)
std::size_t live_bytes();
// Counted one thread at a time: counting takes one itself.
std::ptrdiff_t open_descriptors();

}  // namespace weft::harness
