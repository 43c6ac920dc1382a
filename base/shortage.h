// SPDX-License-Identifier: Apache-2.0
// Tells the user which resource the process has run out of, and how to get more.
#pragma once

#include <string>

namespace weft {

// Returns " (this process may have 64 descriptors open: …)" for EMFILE, "" for other numbers.
// Errors of system_error() include it.
std::string remedy_for(int number);

// Returns how many descriptors this process may still open by its own limit, but no more than
// `most`.
int descriptors_left(int most);

// Throws Busy, with EMFILE and the remedy, if fewer than `count` descriptors are left. Call it
// before a library that would otherwise wait, abort or blame the network. `who` is the subject of
// the error: "rank 0 needs …".
void require_descriptors(int count, const std::string& who);

}  // namespace weft
