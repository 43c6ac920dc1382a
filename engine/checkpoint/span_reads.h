// SPDX-License-Identifier: Apache-2.0
// Reads ranges of one file: some blocks are read while others are compared with their checksums.
// Internal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <weft/engine/checkpoint/checksum.h>
#include <weft/engine/checkpoint/existing_file.h>

namespace weft::checkpoint {

// A range of a file's bytes, and the wanted bytes in it.
struct Span {
  std::uint64_t begin = 0, end = 0;       // in the file
  std::uint64_t first = 0, last = 0;      // the wanted ones of them, in the file
  char* to = nullptr;                     // where they go
  const std::string* checksum = nullptr;  // of the whole range; null without one
  const std::string* name = nullptr;      // of the tensor, for errors
};

// Fills the memory of the spans, which are sorted by `begin`. Uses a few blocks of memory besides
// that. Throws as ExistingFile does, and Caller if bytes are not those that were written.
void read_spans(const ExistingFile& file, const std::vector<Span>& spans, Algorithm algorithm);

}  // namespace weft::checkpoint
