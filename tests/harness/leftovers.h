// SPDX-License-Identifier: Apache-2.0
// Counts resources that a long run must not leak in this process.
#pragma once

#include <cstddef>

namespace weft::harness {

// Returns the bytes that the program has allocated and not freed. (Not the resident set, which only
// grows under a sanitizer.)
std::size_t live_bytes();
// Returns the number of open descriptors. Threads count one after another, because counting itself
// uses a descriptor.
std::ptrdiff_t open_descriptors();

}  // namespace weft::harness
