// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <future>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/existing_file.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/new_file.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint {

namespace {

// Files with so much data go past the page cache.
constexpr std::uint64_t kLarge = std::uint64_t{1} << 20;
constexpr Algorithm kAlgorithm = Algorithm::Xxh3;

// The checksums of each slice's chunks.
std::vector<std::vector<std::string>> checksums_of(const std::vector<SavedSlice>& slices,
                                                   const char* data) {
  std::vector<std::vector<std::string>> all;
  for (const SavedSlice& saved : slices) {
    all.emplace_back();
    for (std::uint64_t at = 0; at < saved.slice.bytes; at += kChunk) {
      const std::uint64_t chunk = std::min(kChunk, saved.slice.bytes - at);
      all.back().push_back(checksum_of(kAlgorithm, data + saved.slice.begin + at, chunk));
    }
  }
  return all;
}

}  // namespace

SavedFile write_slices(const OpenFolder& folder, const std::string& name,
                       std::vector<SavedSlice> slices, const void* data, std::uint64_t data_bytes) {
  const std::string path = folder.path() + "/" + name;
  const bool is_large = data_bytes >= kLarge;
  Header header;
  header.metadata = {{"format", "pt"}};
  for (const SavedSlice& saved : slices) header.slices.push_back(saved.slice);
  const std::string front = is_large ? encode(header, NewFile::kBlock) : encode(header);
  if (front.size() > kMostHeader) {
    throw Error(Blame::Caller, "the checkpoint's file '" + path +
                                   "' would have a header of over 100 MB, which no reader of "
                                   "safetensors takes: save fewer or larger tensors");
  }
  const auto* const bytes = static_cast<const char*>(data);
  NewFile file(folder, name, is_large);
  // While this thread waits for the disk. Without a thread for it, get() computes them.
  auto checksums =
      std::async(is_large ? std::launch::async | std::launch::deferred : std::launch::deferred,
                 [&] { return checksums_of(slices, bytes); });
  const at::Tensor aligned = paged_bytes(front.size());
  std::memcpy(aligned.mutable_data_ptr(), front.data(), front.size());
  file.append(static_cast<const char*>(aligned.const_data_ptr()), front.size());
  file.append(bytes, data_bytes);
  file.finish();
  auto all = checksums.get();
  for (std::size_t i = 0; i < slices.size(); ++i) slices[i].checksums = std::move(all[i]);
  return {name,         front.size() + data_bytes,
          front.size(), checksum_of(kAlgorithm, front.data(), front.size()),
          kAlgorithm,   std::move(slices)};
}

SavedFile index_of(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  SavedFile saved;
  saved.name = name;
  const ExistingFile file(path);
  saved.bytes = file.bytes();
  const auto failure = group::error_of([&] {
    std::string text(std::min<std::uint64_t>(kHeaderLength, saved.bytes), '\0');
    file.read(text.data(), text.size(), 0);
    const std::uint64_t length = header_length(text, saved.bytes);
    text.resize(length);
    file.read(text.data(), length, kHeaderLength);
    saved.data = kHeaderLength + length;
    const Header header = parse_header(text, saved.bytes - saved.data);
    for (const Slice& slice : header.slices) saved.slices.push_back({slice, {}, ""});
  });
  if (failure) throw failure->within("the file '" + path + "' cannot be loaded");
  return saved;
}

}  // namespace weft::checkpoint
