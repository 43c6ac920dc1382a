// SPDX-License-Identifier: Apache-2.0
// Divides the values of a checkpoint among the ranks that write it. Internal.
#pragma once

#include <vector>

#include <weft/engine/checkpoint/manifest.h>
#include <weft/engine/checkpoint/part_values.h>

namespace weft::checkpoint {

// The values that one rank writes: the slices in the order of its file, and their tensors.
struct Share {
  std::vector<SavedSlice> slices;
  std::vector<at::Tensor> tensors;
  std::uint64_t bytes = 0;
};

// Values of Writer::Any are cut into rows of dimension 0, as even as possible; small ones go whole
// to the ranks that have least. Ranks that pass the same values divide them without a hole. Rows
// that a rank has of its own are one slice.
Share share_of(const std::vector<Value>& values, int rank, int ranks);

// Host memory for the share's bytes, pinned if some come from a GPU; at least as much as they are.
// Takes that of an earlier save if it fits. Throws Busy without memory.
at::Tensor memory_for(const Share& share);

}  // namespace weft::checkpoint
