// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint of the folder form. Internal.
#pragma once

#include <string>
#include <vector>

#include <weft/engine/checkpoint/checkpoint.h>

namespace weft::checkpoint {

// Collective: load() of a folder.
void load_folder(const std::string& path, ProcessGroup& group, const std::vector<Part>& parts);

}  // namespace weft::checkpoint
