// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint of the folder form. Internal.
#pragma once

#include <string>
#include <vector>

#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/manifest.h>

namespace weft::checkpoint {

// Collective. Gives all ranks the manifest and the folder that rank 0 has found.
void share_manifest(std::string& folder, Manifest& manifest, ProcessGroup& group);

// Reads the parts, and compares them. Changes nothing until the result is run. `rank`: of this
// process, with values of its own; processes with different ones read the files in another order.
std::vector<Commit> stage_folder(const std::string& folder, const Manifest& manifest,
                                 const std::vector<Part>& parts, int rank);

// Collective: load() of a folder.
void load_folder(const std::string& path, ProcessGroup& group, const std::vector<Part>& parts);

}  // namespace weft::checkpoint
