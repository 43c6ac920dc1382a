// SPDX-License-Identifier: Apache-2.0
// The contents of a checkpoint's folder: the files of all ranks, the slices in them, and their
// checksums. It is written last, as the file "manifest" (see Draft), so a folder with one is whole.
// docs/wire.md describes it for other programs. Internal.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <weft/engine/checkpoint/checksum.h>
#include <weft/engine/checkpoint/safetensors.h>

namespace weft::checkpoint {

constexpr const char* kManifest = "manifest";
// Each slice has one checksum for each so many of its bytes.
constexpr std::uint64_t kChunk = std::uint64_t{64} << 20;

struct SavedSlice {
  Slice slice;
  std::vector<std::string> checksums;  // empty if nobody has written any
  std::string kind;                    // see Value; empty for a plain tensor
};

struct SavedFile {
  std::string name;                       // in the folder
  std::uint64_t bytes = 0;                // of the whole file
  std::uint64_t data = 0;                 // where the data begins
  std::string header;                     // the checksum of the bytes in front of it, or empty
  Algorithm algorithm = Algorithm::Xxh3;  // of all checksums
  std::vector<SavedSlice> slices;
};

struct Manifest {
  // 0 if the folder is not Weft's.
  int ranks = 0;
  // Names and kinds of the parts, in the order in which they were given.
  std::vector<std::pair<std::string, std::string>> parts;
  std::vector<SavedFile> files;
};

std::string encode(const Manifest& manifest);
// Throws Caller for text that encode() has not written, and as check() does.
Manifest parse_manifest(std::string_view text);

// One rank's part of the manifest, as text.
std::string encode(const SavedFile& file);
SavedFile parse_file(std::string_view text);

// A tensor as its slices make it up.
struct SavedTensor {
  struct Place {
    const SavedFile* file;
    const SavedSlice* slice;
  };
  c10::ScalarType dtype{};
  std::vector<std::int64_t> shape;
  std::string kind;
  std::vector<Place> slices;
};

// All tensors of the manifest, which must outlive the result, by name. Throws Caller if the slices
// of a tensor overlap, leave a hole or differ in dtype.
std::map<std::string, SavedTensor> tensors_of(const Manifest& manifest);

}  // namespace weft::checkpoint
