// SPDX-License-Identifier: Apache-2.0
// Reads the rows of tensors out of the slices that a checkpoint's files have of them. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/checkpoint/existing_file.h>
#include <weft/engine/checkpoint/manifest.h>

namespace weft::checkpoint {

// One slice of which some rows are wanted.
struct SliceRead {
  const SavedFile* file;
  const SavedSlice* saved;
  at::Tensor to;       // on the host
  std::int64_t first;  // the row of the whole tensor at which `to` begins
  // Other ranks, perhaps of this host, read the same bytes: the page cache then has them.
  bool is_shared;
};

// Adds the slices that have some of the rows.
void add_reads(const SavedTensor& tensor, const at::Tensor& to, std::int64_t first, bool is_shared,
               std::vector<SliceRead>& reads);

// Files that stay readable though a later save removes them.
using OpenFiles = std::map<const SavedFile*, ExistingFile>;

// Reads file by file, in the order in which the slices are there, from the file `begin` on (modulo
// their number): ranks that read the same files do not read the same one at the same time. Opens
// the files that `open` does not have. Throws Caller if a file is missing, or is not the one that
// was saved.
void read_slices(const std::string& folder, std::vector<SliceRead> reads, std::size_t begin = 0,
                 OpenFiles open = {});

// Compares what read_slices() would read with its checksums, and writes nothing to `to`. `is_own`:
// for the place in the file at which a chunk begins, false if another rank compares it. Returns the
// files, some of them if they are very many, for read_slices(). Throws as that does.
OpenFiles check_slices(
    const std::string& folder, std::vector<SliceRead> reads,
    const std::function<bool(const SavedFile& file, std::uint64_t place)>& is_own);

}  // namespace weft::checkpoint
