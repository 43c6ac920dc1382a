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

// So many bytes are announced to the system before they are read.
constexpr std::uint64_t kAhead = std::uint64_t{32} << 20;

// The rows of the whole tensor that are both in the slice and wanted.
shard::Rows common_rows(const Slice& slice, const at::Tensor& to, std::int64_t first) {
  const std::int64_t begin = std::max(slice.offsets.front(), first);
  const std::int64_t end =
      std::min(slice.offsets.front() + slice.shape.front(), first + to.size(0));
  return {begin, std::max<std::int64_t>(0, end - begin)};
}

// Where the wanted rows are in the slice.
struct Range {
  std::uint64_t from = 0, bytes = 0;
};
Range range_of(const SliceRead& one) {
  const Slice& slice = one.saved->slice;
  if (slice.shape.empty()) return {0, slice.bytes};
  const shard::Rows rows = common_rows(slice, one.to, one.first);
  const std::uint64_t row_bytes = slice.bytes / static_cast<std::uint64_t>(slice.shape.front());
  return {static_cast<std::uint64_t>(rows.first - slice.offsets.front()) * row_bytes,
          static_cast<std::uint64_t>(rows.count) * row_bytes};
}

void read(const SliceFile& file, const SliceRead& one) {
  const Slice& slice = one.saved->slice;
  const auto [from, bytes] = range_of(one);
  at::Tensor place = one.to;
  if (!slice.shape.empty()) {
    const shard::Rows rows = common_rows(slice, one.to, one.first);
    place = place.narrow(0, rows.first - one.first, rows.count);
  }
  for (std::size_t i = 1; i < slice.shape.size(); ++i)
    place = place.narrow(static_cast<std::int64_t>(i), slice.offsets[i], slice.shape[i]);
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

void read_slices(const std::string& folder, std::vector<SliceRead> reads, std::size_t begin) {
  const c10::AutoGradMode no_grad(false);
  std::ranges::sort(reads, [](const SliceRead& a, const SliceRead& b) {
    return a.file != b.file ? a.file < b.file : a.saved->slice.begin < b.saved->slice.begin;
  });
  std::vector<std::size_t> firsts;  // of each file's reads
  for (std::size_t i = 0; i < reads.size(); ++i) {
    if (i == 0 || reads[i - 1].file != reads[i].file) firsts.push_back(i);
  }
  if (!firsts.empty()) {
    const auto first = static_cast<std::ptrdiff_t>(firsts[begin % firsts.size()]);
    std::ranges::rotate(reads, reads.begin() + first);
  }
  std::optional<SliceFile> open;
  std::size_t ahead = 0;      // the first read that was not announced
  std::uint64_t waiting = 0;  // bytes that were announced and not read
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const SliceRead& one = reads[i];
    if (i == 0 || reads[i - 1].file != one.file) {
      open.emplace(folder, *one.file);
      ahead = i;
      waiting = 0;
    }
    for (; ahead < reads.size() && reads[ahead].file == one.file && waiting < kAhead; ++ahead) {
      const Range range = range_of(reads[ahead]);
      open->prefetch(*reads[ahead].saved, range.from, std::min(range.bytes, kAhead));
      waiting += range.bytes;
    }
    read(*open, one);
    waiting -= range_of(one).bytes;
  }
}

}  // namespace weft::checkpoint
