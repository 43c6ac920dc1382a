// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/checkpoint/slice_reads.h>
#include <weft/engine/shard/rows.h>

namespace weft::checkpoint {

namespace {

// The rows of the whole tensor that are both in the slice and wanted.
shard::Rows common_rows(const Slice& slice, const at::Tensor& to, std::int64_t first) {
  const std::int64_t begin = std::max(slice.offsets.front(), first);
  const std::int64_t end =
      std::min(slice.offsets.front() + slice.shape.front(), first + to.size(0));
  return {begin, std::max<std::int64_t>(0, end - begin)};
}

void read(const SliceFile& file, const SliceRead& one) {
  const Slice& slice = one.saved->slice;
  if (slice.shape.empty()) return file.read(*one.saved, 0, slice.bytes, one.to.mutable_data_ptr());
  const shard::Rows rows = common_rows(slice, one.to, one.first);
  at::Tensor place = one.to.narrow(0, rows.first - one.first, rows.count);
  for (std::size_t i = 1; i < slice.shape.size(); ++i)
    place = place.narrow(static_cast<std::int64_t>(i), slice.offsets[i], slice.shape[i]);
  const std::uint64_t row_bytes = slice.bytes / static_cast<std::uint64_t>(slice.shape.front());
  const std::uint64_t from =
      static_cast<std::uint64_t>(rows.first - slice.offsets.front()) * row_bytes;
  const std::uint64_t bytes = static_cast<std::uint64_t>(rows.count) * row_bytes;
  if (place.is_contiguous()) return file.read(*one.saved, from, bytes, place.mutable_data_ptr());
  const at::Tensor aside = at::empty(place.sizes(), place.options());
  file.read(*one.saved, from, bytes, aside.mutable_data_ptr());
  place.copy_(aside);
}

}  // namespace

void add_reads(const SavedTensor& tensor, const at::Tensor& to, std::int64_t first,
               std::vector<SliceRead>& reads) {
  for (const auto& [file, saved] : tensor.slices) {
    const Slice& slice = saved->slice;
    const bool is_wanted =
        slice.bytes > 0 && (slice.shape.empty() || common_rows(slice, to, first).count > 0);
    if (is_wanted) reads.push_back({file, saved, to, first});
  }
}

void read_slices(const std::string& folder, std::vector<SliceRead> reads) {
  const c10::AutoGradMode no_grad(false);
  std::ranges::sort(reads, [](const SliceRead& a, const SliceRead& b) {
    return a.file != b.file ? a.file < b.file : a.saved->slice.begin < b.saved->slice.begin;
  });
  std::optional<SliceFile> open;
  const SavedFile* at = nullptr;
  for (const SliceRead& one : reads) {
    if (at != one.file) open.emplace(folder, *one.file);
    at = one.file;
    read(*open, one);
  }
}

}  // namespace weft::checkpoint
