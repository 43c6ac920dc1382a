// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/json_reading.h>
#include <weft/engine/checkpoint/manifest.h>

namespace weft::checkpoint {

namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "weft-checkpoint";
constexpr std::uint64_t kVersion = 3;
// Its checksums are SHA-256.
constexpr std::uint64_t kOlderVersion = 2;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 62;
// Slices that are not rows are compared in pairs.
constexpr std::size_t kMostBoxes = 1 << 13;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Blame::Caller, "its manifest is damaged: " + why);
}

ordered_json json_of(const SavedFile& file) {
  ordered_json slices = ordered_json::array();
  for (const auto& [slice, checksums, kind] : file.slices) {
    slices.push_back({{"name", slice.name},
                      {"dtype", safetensors_name(slice.dtype)},
                      {"shape", slice.shape},
                      {"offsets", slice.offsets},
                      {"begin", slice.begin},
                      {"checksums", checksums}});
    if (!kind.empty()) slices.back()["kind"] = kind;
  }
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"data", file.data},
          {"checksum", name_of(file.algorithm)},
          {"header_checksum", file.header},
          {"slices", slices}};
}

SavedSlice slice_from(const json& from, const char* checksums) {
  SavedSlice saved;
  Slice& slice = saved.slice;
  slice.name = text_at(from, "name");
  slice.dtype = dtype_of_name(text_at(from, "dtype"));
  slice.shape = numbers_at(from, "shape");
  slice.offsets = numbers_at(from, "offsets");
  slice.begin = count_at(from, "begin");
  slice.bytes = bytes_of(slice.dtype, slice.shape);
  if (from.contains("kind")) saved.kind = text_at(from, "kind");
  if (slice.offsets.size() != slice.shape.size())
    refuse("the offsets of '" + slice.name + "' do not fit its shape");
  for (std::size_t i = 0; i < slice.shape.size(); ++i) {
    if (slice.offsets[i] < 0) refuse("an offset of '" + slice.name + "' is negative");
  }
  for (const json& checksum : list_at(from, checksums)) {
    if (!checksum.is_string()) refuse("a checksum of '" + slice.name + "' is no string");
    saved.checksums.push_back(checksum.get<std::string>());
  }
  const std::uint64_t chunks = slice.bytes / kChunk + (slice.bytes % kChunk != 0 ? 1 : 0);
  if (!saved.checksums.empty() && saved.checksums.size() != chunks)
    refuse("'" + slice.name + "' has another number of checksums than chunks");
  return saved;
}

SavedFile file_from(const json& from, std::uint64_t version = kVersion) {
  SavedFile file;
  file.name = text_at(from, "name");
  if (file.name.empty() || file.name.find('/') != std::string::npos || file.name.front() == '.')
    refuse("a file has the name '" + file.name + "'");
  file.bytes = count_at(from, "bytes");
  file.data = count_at(from, "data");
  const bool is_older = version == kOlderVersion;
  file.algorithm = is_older ? Algorithm::Sha256 : algorithm_of(text_at(from, "checksum"));
  file.header = text_at(from, is_older ? "header_sha256" : "header_checksum");
  if (file.data > file.bytes) refuse("the data of '" + file.name + "' begins behind its end");
  for (const json& slice : list_at(from, "slices")) {
    file.slices.push_back(slice_from(slice, is_older ? "sha256" : "checksums"));
    const Slice& last = file.slices.back().slice;
    if (last.begin > file.bytes - file.data || last.bytes > file.bytes - file.data - last.begin)
      refuse("the bytes of '" + last.name + "' are not inside of '" + file.name + "'");
  }
  return file;
}

bool overlap(const Slice& a, const Slice& b) {
  for (std::size_t i = 0; i < a.shape.size(); ++i) {
    if (a.offsets[i] + a.shape[i] <= b.offsets[i] || b.offsets[i] + b.shape[i] <= a.offsets[i])
      return false;
  }
  return true;
}

void check_slices(const std::string& name, SavedTensor& tensor) {
  auto& slices = tensor.slices;
  std::uint64_t bytes = 0;
  for (const auto& [file, saved] : slices) {
    bytes += saved->slice.bytes;
    if (bytes > kMostBytes) refuse("'" + name + "' has more bytes than any memory");
  }
  std::ranges::stable_sort(slices, {},
                           [](const auto& place) { return place.slice->slice.offsets; });
  // Slices that together have the tensor's bytes and do not overlap leave no hole. Of slices in
  // order only neighbours can overlap if they are rows; one without elements would separate them.
  auto filled = slices;
  std::erase_if(filled, [](const auto& place) { return place.slice->slice.bytes == 0; });
  const bool are_rows = std::ranges::all_of(filled, [&](const auto& place) {
    const auto& shape = place.slice->slice.shape;
    return std::equal(shape.begin() + (shape.empty() ? 0 : 1), shape.end(),
                      tensor.shape.begin() + (shape.empty() ? 0 : 1), tensor.shape.end());
  });
  if (!are_rows && filled.size() > kMostBoxes) refuse("'" + name + "' has too many slices");
  for (std::size_t i = 0; i < filled.size(); ++i) {
    const std::size_t end = are_rows ? std::min(i + 2, filled.size()) : filled.size();
    for (std::size_t k = i + 1; k < end; ++k) {
      if (overlap(filled[i].slice->slice, filled[k].slice->slice)) {
        refuse("the slices of '" + name + "' in '" + filled[i].file->name + "' and '" +
               filled[k].file->name + "' overlap");
      }
    }
  }
  if (bytes != bytes_of(tensor.dtype, tensor.shape)) refuse("a slice of '" + name + "' is missing");
}

}  // namespace

std::string encode(const SavedFile& file) { return json_of(file).dump(); }
SavedFile parse_file(std::string_view text) { return file_from(parse_json(text)); }

std::string encode(const Manifest& manifest) {
  ordered_json parts = ordered_json::array();
  for (const auto& [name, kind] : manifest.parts) parts.push_back({{"name", name}, {"kind", kind}});
  ordered_json files = ordered_json::array();
  for (const SavedFile& file : manifest.files) files.push_back(json_of(file));
  return ordered_json{{"format", kFormat},
                      {"version", kVersion},
                      {"ranks", manifest.ranks},
                      {"parts", parts},
                      {"files", files}}
      .dump(1);
}

Manifest parse_manifest(std::string_view text) {
  const json all = parse_json(text);
  if (text_at(all, "format") != kFormat) refuse("it is of another program");
  const std::uint64_t version = count_at(all, "version");
  if (version != kVersion && version != kOlderVersion) {
    throw Error(Blame::Caller, "its manifest is of version " + std::to_string(version) +
                                   ", which this Weft cannot read");
  }
  Manifest manifest;
  const std::uint64_t ranks = count_at(all, "ranks");
  if (ranks == 0 || ranks > static_cast<std::uint64_t>(std::numeric_limits<int>::max()))
    refuse("it is of " + std::to_string(ranks) + " ranks");
  manifest.ranks = static_cast<int>(ranks);
  for (const json& part : list_at(all, "parts"))
    manifest.parts.emplace_back(text_at(part, "name"), text_at(part, "kind"));
  for (const json& file : list_at(all, "files")) manifest.files.push_back(file_from(file, version));
  tensors_of(manifest);
  return manifest;
}

std::map<std::string, SavedTensor> tensors_of(const Manifest& manifest) {
  std::map<std::string, SavedTensor> tensors;
  for (const SavedFile& file : manifest.files) {
    for (const SavedSlice& saved : file.slices) {
      const Slice& slice = saved.slice;
      SavedTensor& tensor = tensors[slice.name];
      if (tensor.slices.empty()) {
        tensor.dtype = slice.dtype;
        tensor.shape.assign(slice.shape.size(), 0);
        tensor.kind = saved.kind;
      }
      if (tensor.dtype != slice.dtype || tensor.shape.size() != slice.shape.size())
        refuse("the slices of '" + slice.name + "' differ in dtype or dimensions");
      for (std::size_t i = 0; i < slice.shape.size(); ++i)
        tensor.shape[i] = std::max(tensor.shape[i], slice.offsets[i] + slice.shape[i]);
      tensor.slices.push_back({&file, &saved});
    }
  }
  for (auto& [name, tensor] : tensors) check_slices(name, tensor);
  return tensors;
}

}  // namespace weft::checkpoint
