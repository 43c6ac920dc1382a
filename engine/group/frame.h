// The messages of group/membership: a fixed head and a short text. Peers are not trusted: every field is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <weft/base/result.h>

namespace weft::group {

enum class FrameType : std::uint8_t {
  Hello = 1,      // text: the job's token. The first frame of a connection; once more when the rank has joined.
  Lost = 2,       // rank died; text: how it was noticed
  Abort = 3,      // rank aborted group; text: reason; `number`: whether it was meant (0) or kLeftByException
  Leaving = 4,    // rank leaves group after `number` collectives; text: how many messages it sent to each rank of the
                  // group
  Completed = 5,  // rank has completed all that `number` (a rank) took part in before leaving group
  Goodbye = 6,    // rank leaves the job: its connection will close, and that is no loss
  // How ranks that wait learn for whom (group/waits). The last two are of no group.
  Asking = 7,  // rank asks all members of the group how far they have come; `number`: of its round of questions
  Answer = 8,  // to rank `number`; text: a WaitAnswer
  Speak = 9,   // rank `number` waits as well, and is lower: it is to report; text: which of the times is over
  Said = 10,   // rank has reported its wait; `number`: which of the times was over
};

struct Frame {
  FrameType type = FrameType::Hello;
  std::int32_t rank = 0;  // whom it is about, in the job
  std::uint64_t number = 0;
  std::string group;  // "" for the whole job
  std::string text;
};

constexpr std::uint64_t kLeftByException = 1;

constexpr std::size_t kFrameHead = 32;
constexpr std::size_t kMaxFrameText = 64 * 1024;

std::string encode(const Frame& frame);

// Cuts frames out of a byte stream.
class FrameReader {
 public:
  // Ranks outside 0 … ranks - 1 are refused.
  explicit FrameReader(int ranks) : ranks_(ranks) {}
  void append(std::span<const char> bytes) { buffer_.append(bytes.data(), bytes.size()); }
  // The next frame, if it is complete; an Error when the bytes are no frame: the stream is useless from there.
  Result<bool> next(Frame& frame);

 private:
  int ranks_;
  std::string buffer_;
};

}  // namespace weft::group
