// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/ops/empty.h>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/shares.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/zero/partition.h>

namespace weft::checkpoint {

namespace {

// Smaller values are not cut: a file of many small slices takes longer to read.
constexpr std::size_t kWhole = 64 << 10;

bool is_cut(const Value& value, int ranks) {
  return value.tensor.dim() > 0 && value.tensor.nbytes() >= kWhole && value.tensor.size(0) >= ranks;
}

struct Piece {
  Slice slice;
  at::Tensor tensor;
  std::string kind;
};

Piece piece_of(const Value& value, std::int64_t begin, std::int64_t rows) {
  Piece piece;
  piece.kind = value.kind;
  const bool is_part = rows >= 0;
  piece.tensor = is_part ? value.tensor.narrow(0, begin, rows) : value.tensor;
  piece.slice.name = value.name;
  piece.slice.dtype = value.tensor.scalar_type();
  piece.slice.shape = piece.tensor.sizes().vec();
  piece.slice.offsets.assign(piece.slice.shape.size(), 0);
  if (is_part) piece.slice.offsets[0] = begin;
  if (value.rows) piece.slice.offsets[0] += value.rows->rows.first;
  return piece;
}

}  // namespace

Share share_of(const std::vector<Value>& values, int rank, int ranks) {
  std::vector<std::size_t> sizes;
  for (const Value& value : values) {
    if (value.writer == Writer::Any && !is_cut(value, ranks))
      sizes.push_back(value.tensor.nbytes());
  }
  std::vector<std::size_t> loads(static_cast<std::size_t>(ranks));
  const std::vector<int> dealt = parallel::deal_balanced(sizes, loads);
  std::vector<Piece> pieces;
  std::size_t small = 0;
  for (const Value& value : values) {
    if (value.writer == Writer::Any && is_cut(value, ranks)) {
      const std::int64_t rows = (value.tensor.size(0) + ranks - 1) / ranks;
      const std::int64_t begin = std::min(value.tensor.size(0), rank * rows);
      const std::int64_t own = std::min(rows, value.tensor.size(0) - begin);
      if (own > 0) pieces.push_back(piece_of(value, begin, own));
      continue;
    }
    const int writer = value.writer == Writer::Any     ? dealt[small++]
                       : value.writer == Writer::First ? 0
                                                       : rank;
    const bool is_empty = value.rows && value.rows->rows.count == 0;
    if (writer == rank && !is_empty) pieces.push_back(piece_of(value, 0, -1));
  }
  std::vector<Slice> slices;
  std::map<std::string, const Piece*> by_name;
  for (const Piece& piece : pieces) {
    slices.push_back(piece.slice);
    if (!by_name.emplace(piece.slice.name, &piece).second) {
      throw Error(Blame::Caller, "two values of the checkpoint have the name '" + piece.slice.name +
                                     "'; rename the part whose name has a dot");
    }
  }
  Share share;
  share.bytes = lay_out(slices);
  for (Slice& slice : slices) {
    const Piece& piece = *by_name.at(slice.name);
    share.slices.push_back({std::move(slice), {}, piece.kind});
    share.tensors.push_back(piece.tensor);
  }
  return share;
}

at::Tensor memory_for(const Share& share) {
  const bool is_pinned =
      std::ranges::any_of(share.tensors, [](const at::Tensor& tensor) { return tensor.is_cuda(); });
  at::Tensor memory;
  const auto bytes = static_cast<std::int64_t>(share.bytes);
  const auto no_room = group::error_of([&] {
    memory = is_pinned ? at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true))
                       : KeptBytes::take(share.bytes);
    if (!memory.defined()) memory = paged_bytes(share.bytes);
  });
  if (no_room) {
    throw Error(Blame::Busy, "there is no memory for a copy of this rank's " +
                                 std::to_string(share.bytes) + " bytes of the checkpoint");
  }
  return memory;
}

}  // namespace weft::checkpoint
