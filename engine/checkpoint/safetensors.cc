// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <tuple>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/json_reading.h>
#include <weft/engine/checkpoint/safetensors.h>

namespace weft::checkpoint {

namespace {

using nlohmann::ordered_json;

constexpr const char* kMetadata = "__metadata__";
constexpr const char* kSharding = "DCP_SHARDING_INFO";
constexpr const char* kOffsets = "saved_offsets";

using Named = std::pair<c10::ScalarType, std::string_view>;
constexpr std::array kNames = {
    Named{c10::ScalarType::Double, "F64"},
    Named{c10::ScalarType::Float, "F32"},
    Named{c10::ScalarType::Half, "F16"},
    Named{c10::ScalarType::BFloat16, "BF16"},
    Named{c10::ScalarType::Long, "I64"},
    Named{c10::ScalarType::Int, "I32"},
    Named{c10::ScalarType::Short, "I16"},
    Named{c10::ScalarType::Char, "I8"},
    Named{c10::ScalarType::UInt64, "U64"},
    Named{c10::ScalarType::UInt32, "U32"},
    Named{c10::ScalarType::UInt16, "U16"},
    Named{c10::ScalarType::Byte, "U8"},
    Named{c10::ScalarType::Bool, "BOOL"},
    Named{c10::ScalarType::ComplexFloat, "C64"},
    Named{c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    Named{c10::ScalarType::Float8_e5m2, "F8_E5M2"},
    Named{c10::ScalarType::Float8_e4m3fnuz, "F8_E4M3FNUZ"},
    Named{c10::ScalarType::Float8_e5m2fnuz, "F8_E5M2FNUZ"},
    Named{c10::ScalarType::Float8_e8m0fnu, "F8_E8M0"},
};

// The size of a disk's block.
constexpr std::uint64_t kBlock = 4096;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Blame::Caller, "its safetensors header is damaged: " + why);
}

Slice slice_of(const std::string& name, const json& entry, std::uint64_t data_bytes) {
  Slice slice;
  slice.name = name;
  slice.dtype = dtype_of_name(text_at(entry, "dtype"));
  slice.shape = numbers_at(entry, "shape");
  slice.offsets.assign(slice.shape.size(), 0);
  const std::vector<std::int64_t> range = numbers_at(entry, "data_offsets");
  if (range.size() != 2 || range[0] < 0 || range[1] < range[0] ||
      static_cast<std::uint64_t>(range[1]) > data_bytes) {
    refuse("the bytes of '" + name + "' are not inside of the file");
  }
  slice.begin = static_cast<std::uint64_t>(range[0]);
  slice.bytes = static_cast<std::uint64_t>(range[1] - range[0]);
  if (slice.bytes != bytes_of(slice.dtype, slice.shape))
    refuse("the number of bytes of '" + name + "' does not fit its dtype and shape");
  return slice;
}

void read_offsets(Header& header) {
  const auto found = header.metadata.find(kSharding);
  if (found == header.metadata.end()) return;
  const json all = parse_json(found->second);
  for (Slice& slice : header.slices) {
    if (!all.is_object() || !all.contains(slice.name)) continue;
    slice.offsets = numbers_at(all.at(slice.name), kOffsets);
    if (slice.offsets.size() != slice.shape.size() ||
        std::ranges::any_of(slice.offsets, [](std::int64_t offset) { return offset < 0; })) {
      refuse("the saved_offsets of '" + slice.name + "' do not fit its shape");
    }
  }
}

// Throws unless the slices fill the data without holes and overlaps.
void check_places(const Header& header, std::uint64_t data_bytes) {
  std::vector<const Slice*> sorted;
  for (const Slice& slice : header.slices) sorted.push_back(&slice);
  std::ranges::sort(sorted, [](const Slice* a, const Slice* b) {
    return std::tie(a->begin, a->bytes) < std::tie(b->begin, b->bytes);
  });
  std::uint64_t end = 0;
  for (const Slice* slice : sorted) {
    if (slice->begin < end) refuse("the bytes of '" + slice->name + "' overlap others");
    if (slice->begin > end) refuse("there is a hole in front of '" + slice->name + "'");
    end += slice->bytes;
  }
  if (end != data_bytes) refuse("the file has more bytes than its tensors");
}

}  // namespace

std::string_view safetensors_name(c10::ScalarType dtype) {
  const auto* const found = std::ranges::find(kNames, dtype, &Named::first);
  return found == kNames.end() ? std::string_view() : found->second;
}

c10::ScalarType dtype_of_name(std::string_view name) {
  const auto* const found = std::ranges::find(kNames, name, &Named::second);
  if (found == kNames.end()) refuse("it has a dtype that libtorch does not have");
  return found->first;
}

std::uint64_t bytes_of(c10::ScalarType dtype, const std::vector<std::int64_t>& shape) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  std::uint64_t bytes = c10::elementSize(dtype);
  if (std::ranges::find(shape, 0) != shape.end()) bytes = 0;
  for (const std::int64_t size : shape) {
    if (size < 0) refuse("a size is negative");
    if (bytes != 0 && static_cast<std::uint64_t>(size) > kMost / bytes)
      refuse("a tensor has more bytes than any memory");
    bytes *= static_cast<std::uint64_t>(size);
  }
  return bytes;
}

std::uint64_t lay_out(std::vector<Slice>& slices) {
  for (Slice& slice : slices) slice.bytes = bytes_of(slice.dtype, slice.shape);
  const auto order_of = [](const Slice& slice) {
    const bool fills_blocks = slice.bytes % kBlock == 0;
    const std::size_t element = fills_blocks ? 0 : c10::elementSize(slice.dtype);
    return std::tuple(!fills_blocks, std::numeric_limits<std::size_t>::max() - element,
                      std::string_view(slice.name));
  };
  std::ranges::sort(slices, {}, order_of);
  std::uint64_t end = 0;
  for (Slice& slice : slices) {
    slice.begin = end;
    end += slice.bytes;
  }
  return end;
}

std::string encode(const Header& header, std::size_t alignment) {
  ordered_json all = ordered_json::object();
  ordered_json metadata = header.metadata;
  ordered_json sharding = ordered_json::object();
  for (const Slice& slice : header.slices) sharding[slice.name] = {{kOffsets, slice.offsets}};
  metadata[kSharding] = sharding.dump();
  metadata["DCP_VERSION"] = "1.0";
  all[kMetadata] = metadata;
  for (const Slice& slice : header.slices) {
    all[slice.name] = {{"dtype", safetensors_name(slice.dtype)},
                       {"shape", slice.shape},
                       {"data_offsets", {slice.begin, slice.begin + slice.bytes}}};
  }
  std::string text = all.dump();
  text.append((alignment - (kHeaderLength + text.size()) % alignment) % alignment, ' ');
  std::string first;
  for (std::size_t i = 0; i < kHeaderLength; ++i)
    first += static_cast<char>(text.size() >> (8 * i) & 0xff);
  return first + text;
}

std::uint64_t header_length(std::string_view first, std::uint64_t file_bytes) {
  if (first.size() < kHeaderLength || file_bytes < kHeaderLength) refuse("the file is too short");
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kHeaderLength; ++i)
    length |= std::uint64_t{static_cast<unsigned char>(first[i])} << (8 * i);
  if (length > kMostHeader) refuse("it is longer than 100 MB");
  if (length > file_bytes - kHeaderLength) refuse("it is longer than the file");
  return length;
}

Header parse_header(std::string_view text, std::uint64_t data_bytes) {
  const json all = parse_json(text);
  if (!all.is_object()) refuse("it is no JSON object");
  Header header;
  for (const auto& [name, entry] : all.items()) {
    if (name != kMetadata) {
      header.slices.push_back(slice_of(name, entry, data_bytes));
      continue;
    }
    if (!entry.is_object()) refuse("its metadata is no object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse("its metadata has a value that is no string");
      header.metadata.emplace(key, value.get<std::string>());
    }
  }
  read_offsets(header);
  check_places(header, data_bytes);
  return header;
}

}  // namespace weft::checkpoint
