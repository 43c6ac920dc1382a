// Memory that processes of one host share: a file without a name (memfd), whose descriptor is
// passed on, or opened through /proc. All of it is there from the beginning, and nobody can make it
// shorter under those who have mapped it: so no access faults later.
#pragma once

#include <cstddef>
#include <string>

#include <weft/base/descriptor.h>

namespace weft::transport {

// `who` begins the texts of errors: "shm". Throws Busy where there is no memory for it.
Descriptor make_shared_memory(std::size_t bytes, const std::string& who);
// Whether it is of that kind and size: what another process has passed may be anything.
bool is_shared_memory(const Descriptor& memory, std::size_t bytes);

}  // namespace weft::transport
