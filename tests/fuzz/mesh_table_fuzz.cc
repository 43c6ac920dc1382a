// SPDX-License-Identifier: Apache-2.0
// Decodes bytes as a rank of a mesh decodes entries of the store. They are an address or a table,
// which is the same when it is written again, or the decoder refuses them with Protocol. The first
// byte chooses the decoder and the number of ranks.
#include <cstdint>
#include <span>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/transport/mesh/table.h>

namespace {

using namespace weft;
using namespace weft::transport::mesh;

template <class T, class Encode>
void check(const Result<T>& read, Bytes bytes, const Encode& write) {
  if (!read) {
    if (read.error().blame() != Blame::Protocol) broken("a refusal is not a Protocol error");
    return;
  }
  const std::vector<std::byte> written = write(read.value());
  if (written != std::vector<std::byte>(bytes.begin(), bytes.end()))
    broken("bytes change when they are read and written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  if (count == 0) return 0;
  // An allocation of its own, so that a sanitizer detects reads beyond its end.
  const std::vector<std::byte> copy(reinterpret_cast<const std::byte*>(data + 1),
                                    reinterpret_cast<const std::byte*>(data + count));
  if (data[0] % 2 == 0) {
    check(decode_address(copy), copy, [](const std::string& text) { return encode_address(text); });
  } else {
    check(decode_table(copy, data[0] / 2 + 1), copy,
          [](const Table& table) { return encode(table); });
  }
  return 0;
}
