// SPDX-License-Identifier: Apache-2.0
// One rank's file of a checkpoint's folder. One thread at a time. Errors name the file. Internal.
#pragma once

#include <cstdint>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/engine/checkpoint/manifest.h>

namespace weft::checkpoint {

// Writes a new file and returns when it is on the disk. `slices` are laid out, `data` has their
// bytes. Throws Busy for a full disk, Caller for a file that cannot be made.
SavedFile write_slices(const std::string& folder, const std::string& name,
                       std::vector<SavedSlice> slices, const void* data, std::uint64_t data_bytes);

// The file as its own header describes it, without checksums. Throws Caller if it is damaged.
SavedFile index_of(const std::string& folder, const std::string& name);

class SliceFile {
 public:
  // Throws Caller if the file is missing, or is not the one that the manifest describes.
  SliceFile(const std::string& folder, const SavedFile& file);
  // Makes the system begin to read some of the slice's bytes.
  void prefetch(const SavedSlice& saved, std::uint64_t from, std::uint64_t bytes) const;
  // Fills `memory` with some of the slice's bytes. Reads whole chunks where there are checksums.
  // Throws Caller if they are not those that were written.
  void read(const SavedSlice& saved, std::uint64_t from, std::uint64_t bytes, void* memory) const;

 private:
  std::string path_;
  Descriptor file_;
  std::uint64_t data_;
};

}  // namespace weft::checkpoint
