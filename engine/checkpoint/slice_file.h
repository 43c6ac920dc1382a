// SPDX-License-Identifier: Apache-2.0
// One rank's file of a checkpoint's folder as a whole. Errors name the file. Internal.
#pragma once

#include <cstdint>
#include <string>

#include <weft/engine/checkpoint/manifest.h>
#include <weft/engine/checkpoint/open_folder.h>

namespace weft::checkpoint {

// Writes a new file and returns when it is on the disk. `slices` are laid out, `data` has their
// bytes. Throws Busy for a full disk, Caller for a file that cannot be made.
SavedFile write_slices(const OpenFolder& folder, const std::string& name,
                       std::vector<SavedSlice> slices, const void* data, std::uint64_t data_bytes);

// The file as its own header describes it, without checksums. Throws Caller if it is damaged.
SavedFile index_of(const std::string& folder, const std::string& name);

}  // namespace weft::checkpoint
