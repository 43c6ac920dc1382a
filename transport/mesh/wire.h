// What ranks of a mesh say to each other: the first message of a lane, and the header of every
// later one. The layout is the same on both sides (little-endian, 64 bit), so it is copied as it
// lies; whatever a peer sent is checked here, field by field, before anybody looks at it.
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
#include <weft/transport/training.h>

namespace weft::transport::mesh {

using Bytes = std::span<const std::byte>;

// The two lanes of a pair. Messages have their own, so that a collective that waits does not hold
// them up.
enum class Lane : std::uint8_t { Collectives = 0, Messages = 1 };
constexpr int kLanes = 2;

using Secret = std::array<std::byte, 16>;

// Both sides send one first, and believe nothing before they have the other's.
struct Hello {
  Secret secret{};  // of the group: who knows it has read the group's store
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  Lane lane = Lane::Collectives;
};

constexpr std::size_t kHelloBytes = 32;
std::array<std::byte, kHelloBytes> encode(const Hello& hello);
Result<Hello> decode_hello(Bytes header);

// The numbers go on the wire: append, never renumber.
enum class Kind : std::uint8_t {
  Broadcast = 0,
  AllReduce = 1,
  Reduce = 2,
  AllGather = 3,
  Gather = 4,
  Scatter = 5,
  ReduceScatter = 6,
  AllToAll = 7,
  Barrier = 8,
};
std::string_view name(Kind kind);

// What all ranks must say alike when they call a collective. What a kind has no use for is 0.
struct Call {
  Kind kind = Kind::Barrier;
  Dtype dtype = Dtype::UInt8;
  ReduceOp op = ReduceOp::Sum;
  std::int32_t root = 0;
  std::uint64_t bytes = 0;  // of a rank's tensor; of all inputs, for reduce_scatter
  Training training = {};   // as carried(); of a broadcast or an all_reduce
  friend bool operator==(const Call&, const Call&) = default;
};
// As a header carries it, in 32 bits: both numbers begin again at 1 behind the largest that fits
// (255 models, 16,777,215 steps), which does no harm, as they are only compared.
Training carried(const Training& training);
// "all_reduce of 4 bytes of float32 with Sum".
std::string describe(const Call& call);

enum class Type : std::uint8_t {
  Collective = 1,  // one part of a collective
  Failure = 2,  // the sender's communicator is broken; the ranks that this is about, and the text,
                // follow the header
  Eager = 3,    // a message with its bytes
  Request = 4,  // a message whose bytes wait for a Clear
  Clear = 5,    // there is a receive for it
  Payload = 6,  // its bytes
  Credit = 7,   // buffer space for so many more bytes of eager messages
};

struct Header {
  Type type = Type::Collective;
  Call call;  // of a collective; of Eager and Request dtype, and root is the tag; bytes: see each
              // type
  std::uint64_t sequence =
      0;  // of the collective, or the sender's number of a Request, its Clear and its Payload
  // Which of the parts that this rank receives from that one; in a Clear, whether to drop it; in a
  // Failure, how many ranks it is about.
  std::uint32_t number = 0;
  Blame blame = Blame::PeerLost;  // of a Failure; in the place of a Collective's training
};

constexpr std::size_t kHeaderBytes = 32;
constexpr std::size_t kMaxText = 2048;   // of a Failure
constexpr std::size_t kMaxAbout = 1024;  // ranks in a Failure

using EncodedHeader = std::array<std::byte, kHeaderBytes>;
EncodedHeader encode(const Header& header);
// A whole Failure, cut to the limits.
std::vector<std::byte> encode_failure(const Error& why);

// A message as its receiver sees it.
struct Message {
  Header header;
  std::uint64_t payload = 0;  // bytes
  std::vector<int> about;     // ranks, of a Failure
  std::string text;           // of a Failure
};
// `ranks` of the group. An error says what is wrong with it.
Result<Message> decode(Bytes header, std::span<const std::uint64_t> sizes, int ranks);

}  // namespace weft::transport::mesh
