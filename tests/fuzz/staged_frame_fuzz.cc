// SPDX-License-Identifier: Apache-2.0
// Anything that arrives on the connection below a staged one is either refused with a reason, or is
// a message within the limits that is unchanged when it is written again. The input gives the
// number of payloads, 4 bytes for the size of each, then the header.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/staged/staged_frame.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  using namespace weft::transport;
  if (bytes == 0) return 0;
  Capabilities below;
  below.max_header = 2000;
  below.max_payloads = 40;
  below.max_message = 10 << 20;
  const Capabilities limits = staged::capabilities_over(below);
  std::span<const std::uint8_t> left(data + 1, bytes - 1);
  // Messages that the connection below lets through are within its limits.
  std::vector<std::uint64_t> came;
  std::uint64_t total = 0;
  for (std::size_t count = data[0] % 8; count > 0 && left.size() >= 4; --count) {
    const std::uint64_t size =
        left[0] | left[1] << 8 | left[2] << 16 | std::uint64_t{left[3]} << 24;
    left = left.subspan(4);
    if (size > below.max_message - total) return 0;
    total += size;
    came.push_back(size);
  }
  const auto header = std::as_bytes(left.first(std::min(left.size(), below.max_header)));
  std::vector<std::uint64_t> sizes;
  const auto decoded = staged::decode({header, came, {}}, limits, sizes);
  if (decoded.wrong) {
    if (decoded.wrong->empty()) broken("a refusal without a reason");
    return 0;
  }
  if (decoded.kind == staged::Kind::Chunk) {
    if (decoded.total == 0 || decoded.total > staged::kChunkBytes)
      broken("a chunk beyond its limits");
    return 0;
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t size : sizes) sum += size;
  if (sum != decoded.total || sum > limits.max_message)
    broken("the total is not the sum of the sizes");
  if (decoded.header.size() > header.size()) broken("a header longer than the one received");
  if (!decoded.header.empty() &&
      decoded.header.data() + decoded.header.size() != header.data() + header.size()) {
    broken("a header outside the received one");
  }
  std::vector<std::byte> again;
  if (decoded.kind == staged::Kind::Whole) {
    if (decoded.total > staged::kChunkBytes) broken("a whole message that should come in chunks");
    staged::encode_whole(decoded.header, again);
  } else {
    if (sizes.size() > limits.max_payloads || decoded.header.size() > limits.max_header)
      broken("a lead beyond the limits");
    std::vector<Slice> payloads;
    for (const std::uint64_t size : sizes)
      payloads.push_back({nullptr, static_cast<std::size_t>(size), {}});
    again = staged::encode_lead(decoded.header, payloads);
  }
  if (!std::ranges::equal(again, header)) broken("a message changes when it is read and written");
  return 0;
}
