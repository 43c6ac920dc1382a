// SPDX-License-Identifier: Apache-2.0
// Checks of what save_async() and other calls are given. Internal; any thread.
#pragma once

#include <string>
#include <vector>

#include <weft/engine/checkpoint/checkpoint.h>

namespace weft::checkpoint {

// The path without slashes at its end, except for "/".
std::string without_slashes(std::string path);
// Throws Caller if values of one part, which are named "PART.VALUE", could be named like those of
// another.
void refuse_ambiguous(const std::vector<std::string>& names);
// Throws Caller for options that make no sense.
void check_options(const SaveOptions& options);

}  // namespace weft::checkpoint
