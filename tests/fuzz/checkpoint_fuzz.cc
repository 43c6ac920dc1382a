// SPDX-License-Identifier: Apache-2.0
// Checkpoints may have been written by anybody. The first byte selects which text the rest is: the
// front of a safetensors file, or a manifest. Any text is either refused, blamed on the caller, or
// names tensors that fit the file.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/manifest.h>
#include <weft/engine/checkpoint/safetensors.h>

namespace {

using namespace weft;
using namespace weft::checkpoint;

void header(std::string_view file) {
  const std::uint64_t length = header_length(file.substr(0, kHeaderLength), file.size());
  const std::uint64_t data = file.size() - kHeaderLength - length;
  const Header header = parse_header(file.substr(kHeaderLength, length), data);
  std::uint64_t bytes = 0;
  for (const auto& slice : header.slices) {
    if (slice.begin > data || slice.bytes > data - slice.begin) broken("a slice is outside");
    if (slice.offsets.size() != slice.shape.size()) broken("a slice has other dimensions");
    bytes += slice.bytes;
  }
  if (bytes != data) broken("the slices are not all of the data");
}

void manifest(std::string_view text) {
  const Manifest read = parse_manifest(text);
  for (const auto& [name, tensor] : tensors_of(read)) {
    std::uint64_t bytes = 0;
    for (const auto& [file, saved] : tensor.slices) {
      const auto& slice = saved->slice;
      if (slice.bytes > file->bytes || slice.begin > file->bytes - slice.bytes)
        broken("a slice is outside of its file");
      for (std::size_t i = 0; i < slice.shape.size(); ++i) {
        if (slice.offsets[i] + slice.shape[i] > tensor.shape[i])
          broken("a slice is outside of its tensor");
      }
      bytes += slice.bytes;
    }
    if (bytes != bytes_of(tensor.dtype, tensor.shape)) broken("the slices are not the tensor");
  }
  if (parse_manifest(encode(read)).files.size() != read.files.size())
    broken("a manifest is not read again");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, bytes - 1);
  try {
    data[0] % 2 == 0 ? header(text) : manifest(text);
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller) broken("a damaged checkpoint is not blamed on the caller");
  }
  return 0;
}
