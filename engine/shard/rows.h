// SPDX-License-Identifier: Apache-2.0
// How the rows of a parameter are spread over the ranks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace weft::shard {

struct Rows {
  std::int64_t first = 0, count = 0;
};

// The rows of one rank: ceil(rows / ranks) each; the last ranks may have fewer, or none.
inline Rows rows_of(std::int64_t rows, int rank, int ranks) {
  const std::int64_t each = (rows + ranks - 1) / ranks;
  const std::int64_t first = std::min(rows, rank * each);
  return {first, std::min(each, rows - first)};
}

}  // namespace weft::shard
