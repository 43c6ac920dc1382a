// Tells a process that has run out of a resource which one, and how to get more.
#pragma once

#include <string>

namespace weft {

// " (this process may have 64 descriptors open: …)" for EMFILE, "" for other numbers. Errors of
// system_error() have it.
std::string remedy_for(int number);

// How many descriptors this process may still open by its own limit; `most` where it is more than
// that.
int descriptors_left(int most);

// Throws Busy, with EMFILE and the remedy, where fewer than `count` descriptors are left: for what
// calls a library that would wait, abort or blame the network. `who` needs them: "rank 0 needs …".
void require_descriptors(int count, const std::string& who);

}  // namespace weft
