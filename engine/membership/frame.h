// The messages of group/membership: a fixed head and a short text. Peers are not trusted: every
// field is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/result.h>

namespace weft::group {

enum class FrameType : std::uint8_t {
  Hello = 1,  // text: the job's token. The first frame of a connection; once more when the rank has
              // joined.
  Lost = 2,   // rank died; text: how it was noticed
  Abort = 3,  // rank aborted group; text: reason; `number`: whether it was meant (0),
              // kLeftByException or kCallsDiffer
  Leaving = 4,  // rank leaves group after `number` collectives; text: how many messages it sent to
                // each rank of the group
  Completed = 5,  // rank has completed all that `number` (a rank) took part in before leaving group
  Goodbye = 6,    // rank leaves the job: its connection will close, and that is no loss
  // How ranks that wait learn for whom (group/waits). Speak and Said are of no group.
  Asking = 7,   // rank asks all members of the group how far they have come; `number`: of its round
                // of questions
  Answer = 8,   // to rank `number`; text: a WaitAnswer
  Speak = 9,    // rank `number` waits as well, and is lower: it is to report; text: which of the
                // times is over
  Said = 10,    // rank has reported its wait; `number`: which of the times was over
  Called = 11,  // to rank `number`, which compares it with its own call; text: a WaitCall
};

struct Frame {
  FrameType type = FrameType::Hello;
  std::int32_t rank = 0;  // whom it is about, in the job
  std::uint64_t number = 0;
  std::string group;  // "" for the whole job
  std::string text;
};

constexpr std::uint64_t kLeftByException = 1;
constexpr std::uint64_t kCallsDiffer =
    2;  // ranks of the group called different operations, as the reason says

constexpr std::size_t kFrameHead = 32;
constexpr std::size_t kMaxFrameText = 64 * 1024;

std::string encode(const Frame& frame);

// The text of a Called: what a rank says that it called. A peer's bytes are not trusted.
struct WaitCall {
  std::uint64_t number = 0;  // of the collective: 1, 2, …
  std::string call;          // "broadcast of 8 bytes of float32 from rank 1"
};
std::string encode(const WaitCall& call);
std::optional<WaitCall> decode_wait_call(std::string_view text);

constexpr std::size_t kMostSaid = 300;  // letters of what a peer says, as they are printed
// The text, cut to these, without letters that a terminal may act upon.
std::string printable(std::string_view text);
// Takes a number and the space behind it off the text.
std::optional<std::uint64_t> take_number(std::string_view& text);

// Cuts frames out of a byte stream.
class FrameReader {
 public:
  // Ranks outside 0 … ranks - 1 are refused.
  explicit FrameReader(int ranks) : ranks_(ranks) {}
  void append(std::span<const char> bytes) { buffer_.append(bytes.data(), bytes.size()); }
  // The next frame, if it is complete; an Error when the bytes are no frame: the stream is useless
  // from there.
  Result<bool> next(Frame& frame);

 private:
  int ranks_;
  std::string buffer_;
};

}  // namespace weft::group
