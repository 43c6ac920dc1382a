// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>

#include <c10/core/GradMode.h>

#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/slice_reads.h>
#include <weft/engine/checkpoint/span_reads.h>
#include <weft/engine/shard/rows.h>

namespace weft::checkpoint {

namespace {

// Files of which so many bytes are read by this rank alone are read past the page cache.
constexpr std::uint64_t kLarge = std::uint64_t{1} << 20;
// So many files stay open: a process may often open no more than 1024.
constexpr std::size_t kMostOpen = 128;

// The rows of the whole tensor that are both in the slice and wanted.
shard::Rows common_rows(const Slice& slice, const at::Tensor& to, std::int64_t first) {
  const std::int64_t begin = std::max(slice.offsets.front(), first);
  const std::int64_t end =
      std::min(slice.offsets.front() + slice.shape.front(), first + to.size(0));
  return {begin, std::max<std::int64_t>(0, end - begin)};
}

// The place of the wanted rows in the slice.
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

// The memory that the rows are read to: `wanted`, or, if their bytes do not follow each other
// there, `aside`, from which they are copied.
struct Place {
  at::Tensor wanted;
  at::Tensor aside;
};
Place place_of(const SliceRead& one) {
  const Slice& slice = one.saved->slice;
  Place place{one.to, {}};
  if (!slice.shape.empty()) {
    const shard::Rows rows = common_rows(slice, one.to, one.first);
    place.wanted = place.wanted.narrow(0, rows.first - one.first, rows.count);
  }
  for (std::size_t i = 1; i < slice.shape.size(); ++i) {
    place.wanted =
        place.wanted.narrow(static_cast<std::int64_t>(i), slice.offsets[i], slice.shape[i]);
  }
  if (!place.wanted.is_contiguous())
    place.aside = paged_tensor(place.wanted.sizes(), place.wanted.scalar_type());
  return place;
}

// Adds a span for each chunk with a checksum of which some bytes are wanted, or one for all bytes.
void add_spans(const SliceRead& one, const at::Tensor& to, std::vector<Span>& spans) {
  const Slice& slice = one.saved->slice;
  const std::vector<std::string>& checksums = one.saved->checksums;
  const Range range = range_of(one);
  const std::uint64_t data = one.file->data + slice.begin;
  const std::uint64_t last = range.from + range.bytes;
  auto* const memory = static_cast<char*>(to.mutable_data_ptr());
  if (checksums.empty()) {
    spans.push_back({data + range.from, data + last, data + range.from, data + last, memory,
                     nullptr, &slice.name});
    return;
  }
  for (std::uint64_t chunk = range.from / kChunk; chunk * kChunk < last; ++chunk) {
    const std::uint64_t begin = chunk * kChunk;
    const std::uint64_t end = std::min(begin + kChunk, slice.bytes);
    const std::uint64_t first = std::max(begin, range.from);
    spans.push_back({data + begin, data + end, data + first, data + std::min(end, last),
                     memory + (first - range.from), &checksums[chunk], &slice.name});
  }
}

// Throws Caller unless the file is the one that the manifest describes.
void check_front(const ExistingFile& file, const SavedFile& saved) {
  if (file.bytes() != saved.bytes) {
    file.refuse("it has " + std::to_string(file.bytes()) + " bytes instead of " +
                std::to_string(saved.bytes));
  }
  if (saved.header.empty()) return;
  if (saved.data > kHeaderLength + kMostHeader) file.refuse("its header is over 100 MB");
  std::string front(saved.data, '\0');
  file.read(front.data(), front.size(), 0);
  if (checksum_of(saved.algorithm, front.data(), front.size()) != saved.header)
    file.refuse("the checksum of its header differs");
}

// The file, which it opens unless it is open.
ExistingFile& opened(OpenFiles& open, const std::string& folder, const SavedFile& saved) {
  return open.try_emplace(&saved, folder + "/" + saved.name).first->second;
}

// Reads what is wanted of one file, and closes it.
void read_file(const std::string& folder, std::span<const SliceRead> reads, OpenFiles& open) {
  const SavedFile& saved = *reads.front().file;
  ExistingFile& file = opened(open, folder, saved);
  check_front(file, saved);
  std::vector<Place> places;
  std::vector<Span> spans;
  std::uint64_t own = 0;
  for (const SliceRead& one : reads) {
    const Place& place = places.emplace_back(place_of(one));
    add_spans(one, place.aside.defined() ? place.aside : place.wanted, spans);
    if (!one.is_shared) own += range_of(one).bytes;
  }
  if (own >= kLarge) file.go_past_page_cache();
  read_spans(file, spans, saved.algorithm);
  for (const Place& place : places) {
    if (place.aside.defined()) place.wanted.copy_(place.aside);
  }
  open.erase(&saved);
}

// Sorts the reads as they are in the files; returns those of each file.
std::vector<std::span<const SliceRead>> by_file(std::vector<SliceRead>& reads) {
  std::ranges::sort(reads, [](const SliceRead& a, const SliceRead& b) {
    return a.file != b.file ? a.file < b.file : a.saved->slice.begin < b.saved->slice.begin;
  });
  std::vector<std::span<const SliceRead>> files;
  for (std::size_t i = 0, first = 0; i < reads.size(); ++i) {
    if (i + 1 < reads.size() && reads[i + 1].file == reads[i].file) continue;
    files.emplace_back(&reads[first], i + 1 - first);
    first = i + 1;
  }
  return files;
}

}  // namespace

void add_reads(const SavedTensor& tensor, const at::Tensor& to, std::int64_t first, bool is_shared,
               std::vector<SliceRead>& reads) {
  for (const auto& [file, saved] : tensor.slices) {
    const Slice& slice = saved->slice;
    const bool is_wanted =
        slice.bytes > 0 && (slice.shape.empty() || common_rows(slice, to, first).count > 0);
    if (is_wanted) reads.push_back({file, saved, to, first, is_shared});
  }
}

void read_slices(const std::string& folder, std::vector<SliceRead> reads, std::size_t begin,
                 OpenFiles open) {
  const c10::AutoGradMode no_grad(false);
  const auto files = by_file(reads);
  for (std::size_t i = 0; i < files.size(); ++i)
    read_file(folder, files[(begin + i) % files.size()], open);
}

OpenFiles check_slices(
    const std::string& folder, std::vector<SliceRead> reads,
    const std::function<bool(const SavedFile& file, std::uint64_t place)>& is_own) {
  OpenFiles open;
  for (const auto& of_file : by_file(reads)) {
    const SavedFile& saved = *of_file.front().file;
    const ExistingFile& file = opened(open, folder, saved);
    check_front(file, saved);
    std::vector<Span> spans;
    for (const SliceRead& one : of_file) add_spans(one, one.to, spans);
    std::erase_if(spans, [&](const Span& span) {
      return span.checksum == nullptr || !is_own(saved, span.begin);
    });
    for (Span& span : spans) span.last = span.first;  // nothing is wanted
    read_spans(file, spans, saved.algorithm);
    if (open.size() > kMostOpen) open.erase(&saved);
  }
  return open;
}

}  // namespace weft::checkpoint
