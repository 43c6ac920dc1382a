// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: names, dtypes, shapes and places of the tensors in it.
// https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON object, the
// object, then the data without holes. Touches no files. Internal.
//
// A file holds slices of tensors. "DCP_SHARDING_INFO" in the metadata, which PyTorch's
// HuggingFaceStorageReader and -Writer use, says at which offsets of the whole tensor each begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace weft::checkpoint {

struct Slice {
  std::string name;
  c10::ScalarType dtype{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> offsets;  // of the first element in the whole tensor
  std::uint64_t begin = 0;            // of the bytes, from the end of the header
  std::uint64_t bytes = 0;
};

struct Header {
  std::vector<Slice> slices;
  std::map<std::string, std::string> metadata;
};

// Longer headers are refused, as the format's own library does.
constexpr std::uint64_t kMostHeader = 100'000'000;
// The bytes in front of the JSON object.
constexpr std::size_t kHeaderLength = 8;

// The name of a dtype in the format; empty if it has none.
std::string_view safetensors_name(c10::ScalarType dtype);
// Throws Caller for a name that is no dtype of libtorch.
c10::ScalarType dtype_of_name(std::string_view name);
// The bytes of a tensor of that shape. Throws Caller for a negative size and for more than 2^62.
std::uint64_t bytes_of(c10::ScalarType dtype, const std::vector<std::int64_t>& shape);

// Sorts the slices as they follow each other in the file, sets their places, and returns the bytes
// of the data. Slices that fill blocks of a disk come first, so that they begin at one, then those
// with larger elements, so that all are aligned.
std::uint64_t lay_out(std::vector<Slice>& slices);

// The file's bytes in front of the data, a multiple of `alignment`, which is at least 8.
std::string encode(const Header& header, std::size_t alignment = 8);

// The length of the JSON object from the first eight bytes of a file. Throws Caller unless a file
// of that size can have such a header.
std::uint64_t header_length(std::string_view first, std::uint64_t file_bytes);
// Parses the JSON object. `data_bytes`: the bytes of the file behind it. Throws Caller if they are
// not exactly the slices' bytes, if a slice's bytes do not fit its dtype and shape, and for
// anything else that the format does not allow.
Header parse_header(std::string_view json, std::uint64_t data_bytes);

}  // namespace weft::checkpoint
