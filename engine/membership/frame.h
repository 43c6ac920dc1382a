// SPDX-License-Identifier: Apache-2.0
// The messages of engine/membership: a fixed head and a short text. Peers are not trusted: every
// field is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/result.h>

namespace weft::group {

enum class FrameType : std::uint8_t {
  // The first frame of a connection, both ways. From the rank that connects; text: the other's
  // token.
  Hello = 1,
  // `rank` has died; text: how that was noticed; number: kCut if it may live on, out of reach.
  Lost = 2,
  // `rank` has aborted the group; text: the reason; number: 0 if the program meant it, else
  // kLeftByException, kCallsDiffer or kGaveUp.
  Abort = 3,
  // `rank` leaves the group after `number` collectives; text: the ranks of the group that it has
  // sent messages to, each followed by how many: "2 5 " is five to rank 2.
  Leaving = 4,
  // `rank` has completed every operation that rank `number` took part in before it left the group;
  // text: other ranks that have too (answers.h).
  Completed = 5,
  // `rank` leaves the job. Its neighbours send nothing more to it. It passes on frames until all
  // of them have read this, and then closes its connections, which is no loss (departing.cc).
  Goodbye = 6,
  // The frames below tell waiting ranks which ranks they wait for (group/waits). Speak and Said
  // belong to no group. A report level is the number of report times that have passed.
  // `rank` asks all members of the group how far they have come; number: the round of questions.
  Asking = 7,
  // The answer for rank `number`; text: a WaitAnswer.
  Answer = 8,
  // Asks rank `number`, which waits too and is lower than `rank`, to report; text: the level.
  Speak = 9,
  // `rank` has reported its wait; number: the report level.
  Said = 10,
  // For rank `number`, which compares it with its own call; text: a WaitCall.
  Called = 11,
  // `rank` takes part, and listens at an address; text: the address (published.h).
  Here = 12,
  // `rank` has joined, and needs the store no more. For the root of the tree.
  Joined = 13,
  // To rank `number`, which keeps a store, and its answer; text: a StoreMessage.
  StoreRequest = 14,
  StoreReply = 15,
  // Before Hello, if the group has a secret; text: a message of transport/challenge.h.
  Challenge = 16,
};

// The number of a Lost frame: the rank's machine does not answer.
constexpr std::uint64_t kCut = 1;

struct Frame {
  FrameType type = FrameType::Hello;
  std::int32_t rank = 0;  // the sender's rank in the job; for Lost, the rank that died
  std::uint64_t number = 0;
  std::string group;  // "" for the whole job
  std::string text;
  // Counts the frames of `rank` that go to all ranks and must reach each of them once (Abort,
  // Leaving): 1, 2, …
  std::uint32_t sequence = 0;
};

// The rank left the group, or could not join it. The text continues "rank 1 …".
constexpr std::uint64_t kLeftByException = 1;
// Ranks of the group called different operations, as the reason says.
constexpr std::uint64_t kCallsDiffer = 2;
// The rank left the group because it was broken there; the text is an encoded reason.
constexpr std::uint64_t kGaveUp = 3;

constexpr std::size_t kFrameHead = 32;
constexpr std::size_t kMaxFrameText = 64 * 1024;
constexpr std::size_t kMaxLeavingText = 1024 * 1024;
constexpr std::size_t kMaxStoreText = 16 * 1024 * 1024;  // of StoreRequest and StoreReply
constexpr std::size_t longest_text(FrameType type) {
  switch (type) {
    case FrameType::Leaving: return kMaxLeavingText;
    case FrameType::StoreRequest:
    case FrameType::StoreReply: return kMaxStoreText;
    default: return kMaxFrameText;
  }
}

std::string encode(const Frame& frame);

// The ranks that a Completed frame names: frame.rank, and those of its text up to the first that is
// none. FrameReader refuses frames that name other ranks than the job's.
std::vector<int> completers(const Frame& frame);

// The text of a Called frame: the call of the sending rank. A peer's bytes are not trusted.
struct WaitCall {
  std::uint64_t number = 0;  // number of the collective: 1, 2, …
  std::string call;          // "broadcast of 2 elements of float32 from rank 1"
};
std::string encode(const WaitCall& call);
std::optional<WaitCall> decode_wait_call(std::string_view text);

// The text of an Abort frame with kGaveUp: why the group broke on the sending rank, and the ranks
// that the reason names.
std::string encode_reason(const Error& reason);
// Returns nullopt unless all ranks that it names are ranks of a group of `size` ranks. A peer's
// bytes are not trusted.
std::optional<Error> decode_reason(std::string_view text, int size);

constexpr std::size_t kMostSaid = 300;  // characters of a peer's text that are printed
// The text, cut to kMostSaid, with control characters replaced.
std::string printable(std::string_view text);
// Removes a number and the space after it from the text; nullopt if there is none.
std::optional<std::uint64_t> take_number(std::string_view& text);

// Cuts frames out of a byte stream.
class FrameReader {
 public:
  // Refuses ranks outside of 0 … ranks - 1. `has_greeted`: false until the peer has said which rank
  // it is; until greeted(), frames other than Hello and Challenge are refused, before their text is
  // here.
  explicit FrameReader(int ranks, bool has_greeted = true)
      : ranks_(ranks), has_greeted_(has_greeted) {}
  void greeted() { has_greeted_ = true; }
  void append(std::span<const char> bytes);
  // Takes the next frame, if it is complete. Returns an Error for malformed bytes; the rest of the
  // stream is then useless.
  Result<bool> next(Frame& frame);

 private:
  int ranks_;
  bool has_greeted_;
  std::string buffer_;
  std::size_t begin_ = 0;  // of the bytes that next() has not taken
};

}  // namespace weft::group
