// What two ends of a cuda_ipc lane tell each other over the lane below it. Its messages begin with
// a byte that says what they are:
//
//   hello    first, once: who this process is, its GPUs with the events that it records, its page
//   of words, and the
//            socket on which it passes descriptors of memory
//   reach    second, once: whose of the peer's GPUs this process can read
//   plain    the header behind it; all payloads are those of the message below
//   shared   some payloads stay where they are and are named; the others are those of the message
//   below
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

constexpr std::size_t kSlots = 16;    // of a GPU: messages that its memory is named in at a time
constexpr std::size_t kMaxGpus = 16;  // of a process

enum class Kind : std::uint8_t { Hello = 1, Reach = 2, Plain = 3, Shared = 4 };

// Tells processes apart, and whether they can open each other's memory.
struct Identity {
  std::string host;       // changes when it is booted; empty where /proc does not tell
  std::string processes;  // the namespace of process numbers
  std::uint64_t process = 0;
  std::uint64_t started = 0;  // when it was: numbers of processes come back

  static Identity here();
};
// Why memory cannot be shared between these; nothing where it may be.
std::optional<std::string> why_unreachable(const Identity& here, const Identity& there);

struct Gpu {
  cuda::Uuid uuid{};
  std::vector<cuda::IpcHandle> events;  // kSlots of them
};

// A page of a process.
struct PageName {
  std::uint32_t descriptor = 0;
  std::uint64_t key = 0;  // which the page holds as well
};

struct Hello {
  Identity identity;
  PageName page;
  std::uint32_t socket = 0;  // the descriptor of its name; 0: there is none
  std::vector<Gpu> gpus;
};
std::vector<std::byte> encode(const Hello& hello);
Result<Hello> decode_hello(Bytes bytes);

// A bit for each of the GPUs of the peer's hello.
std::vector<std::byte> encode_reach(std::uint32_t gpus);
Result<std::uint32_t> decode_reach(Bytes bytes);

// A part of a payload that stays where it is: bytes of one allocation.
struct Piece {
  std::uint64_t bytes = 0;       // not 0
  std::uint64_t allocation = 0;  // a number of the sender's
  std::uint64_t replaces = 0;    // the number of one that is no more; 0: none
  std::uint64_t offset = 0;
  // One of these, the first time: how the allocation is opened.
  std::optional<cuda::IpcHandle> handle;
  std::uint64_t passed = 0;  // its bytes: its descriptor was passed on the socket, with its number
};
struct Payload {
  std::uint64_t bytes = 0;
  std::vector<Piece> pieces;  // all of it, in order; none: the message below has it
};
struct Shared {
  std::uint32_t gpu = 0;  // of the hello's, that all named payloads lie on
  std::uint32_t slot =
      0;  // the event to wait for, and the word to raise when the payloads have been read
  std::uint32_t value = 0;
  std::vector<Payload> payloads;
  Bytes header;  // part of what was decoded
};

// What a lane can do over one that can do `below`. Its payloads together have at most max_payloads
// pieces.
Capabilities capabilities_over(const Capabilities& below);

std::vector<std::byte> encode_plain(Bytes header);
std::vector<std::byte> encode(const Shared& message);
// `sizes`: of the payloads of the message below, which are those that are not named.
Result<Shared> decode_shared(Bytes bytes, std::span<const std::uint64_t> sizes,
                             const Capabilities& limits);

}  // namespace weft::transport::cuda_ipc
