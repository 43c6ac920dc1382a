// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <weft/engine/call/wire.h>

namespace weft::call {

namespace {

Error foreign(const std::string& what) {
  return Error(Blame::Protocol, "the peer sent bytes that are not a message of an agent: " + what);
}

}  // namespace

void append_head(std::vector<std::byte>& bytes, const Head& head,
                 std::span<const StorageEntry> table) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof head + table.size() * kStorageEntryBytes);
  std::byte* to = bytes.data() + at;
  std::memcpy(to, &head, sizeof head);
  to += sizeof head;
  for (const StorageEntry& entry : table) {
    const std::uint64_t packed = entry.begin | std::uint64_t{entry.device_type} << 48 |
                                 std::uint64_t{entry.device_index} << 56;
    std::memcpy(to, &packed, sizeof packed);
    to += kStorageEntryBytes;
  }
}

Result<ParsedHead> parse_head(std::span<const std::byte> bytes, std::size_t payloads) {
  ParsedHead parsed;
  Head& head = parsed.head;
  if (bytes.size() < sizeof head) return foreign(std::to_string(bytes.size()) + " bytes");
  std::memcpy(&head, bytes.data(), sizeof head);
  bytes = bytes.subspan(sizeof head);
  if (head.kind < FrameKind::Hello || head.kind > FrameKind::Cancel) {
    return foreign("kind " + std::to_string(static_cast<int>(head.kind)));
  }
  if ((head.flags & ~(kBodyAside | kOnLoop | kNoGrad)) != 0 || head.reserved != 0)
    return foreign("unknown flags");
  const bool aside = (head.flags & kBodyAside) != 0;
  if (head.storages > kMaxTable || head.storages + (aside ? 1 : 0) != payloads)
    return foreign("its payloads do not fit its table");
  if (head.storages * kStorageEntryBytes > bytes.size()) return foreign("its table is cut off");
  if (head.time_left < 0) return foreign("a time limit in the past");
  parsed.table.reserve(head.storages);
  for (std::uint32_t i = 0; i < head.storages; ++i) {
    std::uint64_t packed = 0;
    std::memcpy(&packed, bytes.data() + i * kStorageEntryBytes, sizeof packed);
    StorageEntry entry;
    entry.begin = packed & ((std::uint64_t{1} << 48) - 1);
    entry.device_type = static_cast<std::uint8_t>(packed >> 48);
    entry.device_index = static_cast<std::uint8_t>(packed >> 56);
    if (entry.device_type > 1)
      return foreign("a device of type " + std::to_string(entry.device_type));
    parsed.table.push_back(entry);
  }
  parsed.rest = bytes.subspan(head.storages * kStorageEntryBytes);
  if (aside && !parsed.rest.empty()) return foreign("two bodies");
  return parsed;
}

}  // namespace weft::call
