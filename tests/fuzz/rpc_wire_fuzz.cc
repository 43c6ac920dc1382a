// SPDX-License-Identifier: Apache-2.0
// Anything that a peer sends as the head of a message is either refused as the peer's fault, or
// claims no more than was received and is unchanged when it is written again. The first byte gives
// the number of payloads that came with it.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/wire.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  if (bytes == 0) return 0;
  const std::size_t payloads = data[0] % 8;
  const auto input = std::as_bytes(std::span(data + 1, bytes - 1));
  const auto parsed = call::parse_head(input, payloads);
  if (!parsed) {
    if (parsed.error().blame() != Blame::Protocol) broken("a peer's bytes are not blamed on it");
    return 0;
  }
  const auto& [head, table, rest] = parsed.value();
  if (head.kind < call::FrameKind::Hello || head.kind > call::FrameKind::Cancel)
    broken("a kind that does not exist");
  if (head.time_left < 0) broken("a deadline in the past");
  const bool aside = (head.flags & call::kBodyAside) != 0;
  if (table.size() + (aside ? 1 : 0) != payloads) broken("more or fewer storages than payloads");
  if (aside && !rest.empty()) broken("two bodies");
  for (const auto& entry : table) {
    if (entry.device_type > 1 || entry.begin >> 48 != 0) broken("an impossible storage");
  }
  std::vector<std::byte> again;
  call::append_head(again, head, table);
  again.insert(again.end(), rest.begin(), rest.end());
  if (!std::ranges::equal(again, input)) broken("a head changes when it is read and written");
  return 0;
}
