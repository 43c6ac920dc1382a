// SPDX-License-Identifier: Apache-2.0
// The messages between the ranks of a mesh: the hello that opens a connection, and the header of
// every later message. Both sides use the same layout (little-endian, 64 bit), so structs are
// copied byte for byte. The decoders check every field that a peer sent before any other code uses
// it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/dtype.h>
#include <weft/base/result.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/collective.h>

namespace weft::transport::mesh {

using Bytes = std::span<const std::byte>;

// The traffic of one connection. A pair of ranks has two connections, so that a waiting collective
// does not delay messages.
enum class Traffic : std::uint8_t { Collectives = 0, Messages = 1 };
constexpr int kConnectionsPerPair = 2;
inline constexpr std::array kTraffics = {Traffic::Collectives, Traffic::Messages};

using Token = std::array<std::byte, 16>;

constexpr std::uint32_t kMagic = 0x6d746677;  // "wftm"
constexpr std::uint16_t kVersion = 7;

// Tells whether the sender of a hello uses the connection.
enum class Answer : std::uint8_t {
  Takes = 0,
  // Refuses it: two ranks have connected to each other at once, and use the connection that the
  // higher rank has made.
  Crossed = 1,
  // Refuses it: the sender has left the group.
  Left = 2,
};
constexpr Answer kLastAnswer = Answer::Left;

// Both sides send one first, and accept nothing else before they have the other's.
struct Hello {
  Token token{};  // of the Door's first group; a process that knows it has read the group's store
  Token group{};  // the group, of some of those ranks (see group_of()); 0: the first one
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  Traffic traffic = Traffic::Collectives;
  Answer answer = Answer::Takes;
  // How many connections of these two ranks and this traffic have ended by agreement. A hello that
  // was under way while another connection was used and closed tells fewer, and is refused.
  std::uint32_t closed = 0;
};

constexpr std::size_t kHelloBytes = 52;
std::array<std::byte, kHelloBytes> encode(const Hello& hello);
Result<Hello> decode_hello(Bytes header);

// Its numbers go on the wire.
using Kind = CollectiveKind;

// The arguments of a collective that must be equal on all ranks. Fields that a kind does not use
// are 0.
struct Call {
  Kind kind = Kind::Barrier;
  Dtype dtype = Dtype::UInt8;
  ReduceOp op = ReduceOp::Sum;
  std::int32_t root = 0;
  // Of one rank's tensor; for reduce_scatter, of all inputs together; for all_to_all, of one part
  // if the plan is the one that gathers equal parts (exchange.cc), else 0.
  std::uint64_t bytes = 0;
  Training training = {};  // of a broadcast or an all_reduce, as returned by carried()
  friend bool operator==(const Call&, const Call&) = default;
};
// Returns `training` reduced to the 32 bits that a header has for it: after the largest number that
// fits (255 models, 16,777,215 steps) both count from 1 again. That is safe, as they are only
// compared.
Training carried(const Training& training);
// "all_reduce of 1 element of float32 with Sum".
std::string describe(const Call& call);

enum class Type : std::uint8_t {
  Collective = 1,  // one part of a collective
  // The sender's communicator is broken. The header is followed by the ranks that the error is
  // about and by its text.
  Failure = 2,
  Eager = 3,    // a message with its bytes
  Request = 4,  // a message whose bytes wait for a Clear
  Clear = 5,    // there is a receive for it
  Payload = 6,  // its bytes
  Credit = 7,   // buffer space for so many more bytes of eager messages
  Closing = 8,  // a step of closing the connection that it comes on
};

// The steps by which two ranks agree on closing an idle connection (closings.h).
enum class ClosingStep : std::uint32_t {
  Ask = 0,     // the sender would close it
  Agree = 1,   // the sender has nothing to send on it and waits for its end
  Refuse = 2,  // the sender needs it
  Stay = 3,    // the sender asked, but has come to need it
  Idle = 4,    // the sender refused, and needs it no more
};
constexpr ClosingStep kLastClosingStep = ClosingStep::Idle;

struct Header {
  Type type = Type::Collective;
  // For Collective: the whole call. For Eager and Request: `dtype` is the data's and `root` is the
  // tag. `bytes` depends on the type.
  Call call;
  // The collective's sequence number; in a Request, its Clear and its Payload, the sender's number
  // of the message.
  std::uint64_t sequence = 0;
  // Collective: which of the parts from this sender to this receiver it is. Clear: 1 if the sender
  // must drop the message. Failure: how many ranks it is about. Closing: the ClosingStep.
  std::uint32_t number = 0;
  Blame blame = Blame::PeerLost;  // of a Failure; encoded in the field of a Collective's training
};

constexpr std::size_t kHeaderBytes = 32;
constexpr std::size_t kMaxText = 2048;   // of a Failure
constexpr std::size_t kMaxAbout = 1024;  // ranks in a Failure

using EncodedHeader = std::array<std::byte, kHeaderBytes>;
EncodedHeader encode(const Header& header);
// Encodes a Failure; cuts the ranks and the text to the limits above.
std::vector<std::byte> encode_failure(const Error& why);

// A message as its receiver sees it.
struct Message {
  Header header;
  std::uint64_t payload = 0;  // bytes
  std::vector<int> about;     // ranks, of a Failure
  std::string text;           // of a Failure
};
// Decodes a header. `ranks` is the size of the group. Returns an error with the reason if a peer's
// bytes are not valid.
Result<Message> decode(Bytes header, std::span<const std::uint64_t> sizes, int ranks);

}  // namespace weft::transport::mesh
