// SPDX-License-Identifier: Apache-2.0
// The head of every message between agents (docs/wire.md): a fixed part, then a table of the
// storages that follow as payloads, then the msgpack body. A body that is too large for a
// connection's header is the first payload instead. Peers are not trusted: every field is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <weft/base/result.h>

namespace weft::call {

constexpr std::uint32_t kWireVersion = 5;

enum class FrameKind : std::uint8_t {
  Hello = 1,      // the first on a connection, from the connecting side; body: its identity
  Challenge = 2,  // before all others, if the workers share a secret; body: raw nonces and proofs
                  // (transport/challenge.h)
  Call = 3,
  Reply = 4,    // body: the result
  Failure = 5,  // body: the error
  Cancel = 6,   // nobody waits for this call's reply any more
};

// Flags of a Head.
constexpr std::uint8_t kBodyAside = 1;  // the body is payload 0
constexpr std::uint8_t kOnLoop = 2;     // the function is short: run it on the loop
// Made under NoGradGuard: neither the call nor its result is recorded in a context.
constexpr std::uint8_t kNoGrad = 4;

struct Head {
  FrameKind kind = FrameKind::Hello;
  std::uint8_t flags = 0;
  std::uint8_t message = 0;  // MessageKind, of a call
  std::uint8_t reserved = 0;
  std::uint32_t storages = 0;  // entries of the table
  std::uint64_t call = 0;      // number of the call on its connection, chosen by the caller
  std::uint64_t name = 0;      // of a call: the function's Identity
  std::uint64_t signature = 0;
  std::int64_t time_left = 0;  // of a call: ns until its deadline; 0 = none
  std::uint64_t context = 0;   // autograd context; 0 = none
};
static_assert(sizeof(Head) == 48);

// One storage: where the part that is sent began in the sender's storage, and the device that it is
// for, as the receiver numbers devices.
struct StorageEntry {
  std::uint64_t begin = 0;       // bytes; below 2^48
  std::uint8_t device_type = 0;  // 0 host, 1 CUDA
  std::uint8_t device_index = 0;
};
constexpr std::size_t kStorageEntryBytes = 8;
constexpr std::size_t kMaxTable = 4096;
// Bodies up to this many bytes travel in the header.
constexpr std::size_t kMaxBodyInHeader = 24 << 10;

// Appends head and table.
void append_head(std::vector<std::byte>& bytes, const Head& head,
                 std::span<const StorageEntry> table);

struct ParsedHead {
  Head head;
  std::vector<StorageEntry> table;
  std::span<const std::byte> rest;  // the body, unless that is a payload
};
// `payloads` is the number of slices that came with the header.
Result<ParsedHead> parse_head(std::span<const std::byte> bytes, std::size_t payloads);

}  // namespace weft::call
