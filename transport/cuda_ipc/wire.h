// SPDX-License-Identifier: Apache-2.0
// The messages between two ends of a cuda_ipc connection, sent over the connection below it. Each
// begins with a byte that says its kind:
//
//   hello    first, once: this process, its page of words, the socket on which it passes
//            descriptors of memory, and its GPUs with the events that it records
//   reach    second, once: which of the peer's GPUs this process can read
//   plain    the user's header follows; all payloads are those of the message below
//   shared   names some payloads, which stay where they are; the others are those of the message
//            below
//
// Numbers are little-endian. Pure functions over bytes that are not trusted.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/result.h>
#include <weft/cuda/ipc_names.h>
#include <weft/transport/connection.h>

namespace weft::transport::cuda_ipc {

using Bytes = std::span<const std::byte>;

// Messages that may name memory of one GPU at a time.
constexpr std::size_t kSlots = 16;
constexpr std::size_t kMaxGpus = 16;  // GPUs of a process

enum class Kind : std::uint8_t { Hello = 1, Reach = 2, Plain = 3, Shared = 4 };

// Identifies a process, and shows whether two processes can open each other's memory.
struct Identity {
  std::string host;       // the boot id, new at each boot; empty if /proc does not have it
  std::string processes;  // the namespace of process ids
  std::uint64_t process = 0;
  std::uint64_t started = 0;  // start time, because process ids are reused

  static Identity here();
};
// Why these processes cannot share memory; empty if they may.
std::optional<std::string> why_unreachable(const Identity& here, const Identity& there);

struct Gpu {
  cuda::Uuid uuid{};
  std::vector<cuda::IpcHandle> events;  // kSlots of them
};

// Names a page of a process.
struct PageName {
  std::uint32_t descriptor = 0;
  std::uint64_t key = 0;  // the page contains it too
};

struct Hello {
  Identity identity;
  PageName page;
  std::uint32_t socket = 0;  // descriptor of the socket's name; 0: no socket
  std::vector<Gpu> gpus;
};
std::vector<std::byte> encode(const Hello& hello);
Result<Hello> decode_hello(Bytes bytes);

// The GPUs of the peer's hello that this process can read, one bit for each.
std::vector<std::byte> encode_reach(std::uint32_t gpus);
Result<std::uint32_t> decode_reach(Bytes bytes);

// A part of a named payload: bytes of one allocation.
struct Piece {
  std::uint64_t bytes = 0;       // not 0
  std::uint64_t allocation = 0;  // the sender's number of it
  std::uint64_t replaces = 0;    // number of an allocation that no longer exists; 0: none
  std::uint64_t offset = 0;
  // How to open the allocation. The first message that names it has one of these.
  std::optional<cuda::IpcHandle> handle;
  std::uint64_t passed = 0;  // size of the allocation, if its descriptor was passed on the socket
};
struct Payload {
  std::uint64_t bytes = 0;
  // Cover the payload, in order. Empty if the message below carries the payload.
  std::vector<Piece> pieces;
};
struct Shared {
  std::uint32_t gpu = 0;  // index in the hello; holds all named payloads
  // The event to wait for, and the word to raise when the payloads have been read.
  std::uint32_t slot = 0;
  std::uint32_t value = 0;
  std::vector<Payload> payloads;
  Bytes header;  // part of the decoded bytes
};

// The capabilities of a connection over one with capabilities `below`. The payloads of one message
// together have at most max_payloads pieces.
Capabilities capabilities_over(const Capabilities& below);

std::vector<std::byte> encode_plain(Bytes header);
std::vector<std::byte> encode(const Shared& message);
// `sizes` are the sizes of the payloads of the message below: those that are not named.
Result<Shared> decode_shared(Bytes bytes, std::span<const std::uint64_t> sizes,
                             const Capabilities& limits);

}  // namespace weft::transport::cuda_ipc
