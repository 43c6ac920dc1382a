// SPDX-License-Identifier: Apache-2.0
// Memory that processes of one host share: a file without a name (memfd), whose descriptor is
// passed on, or opened through /proc. It is allocated at the start, and sealed so that nobody can
// shrink it under a process that has mapped it: so no access faults later.
#pragma once

#include <cstddef>
#include <string>

#include <weft/base/descriptor.h>

namespace weft::transport {

// `who` begins error texts: "shm". Throws Busy if there is not enough memory. Allocates the first
// `allocated` bytes; the others have to be allocated (MADV_POPULATE_WRITE) before they are used.
Descriptor make_shared_memory(std::size_t bytes, const std::string& who, std::size_t allocated);
// Allocates all of them.
Descriptor make_shared_memory(std::size_t bytes, const std::string& who);
// True if the memory has that size and those seals. Another process may have passed any descriptor.
bool is_shared_memory(const Descriptor& memory, std::size_t bytes);

}  // namespace weft::transport
