// Whether a peer has fallen silent: bytes are on their way to it and its kernel acknowledges
// nothing, for as long as Settings::silence. Looked at now and then, on one thread. The kernel
// itself would wait a quarter of an hour, or take a peer that answers but has no room for a dead
// one (TCP_USER_TIMEOUT).
#pragma once

#include <optional>

#include <weft/base/deadline.h>

namespace weft::transport::tcp {

class Silence {
 public:
  explicit Silence(std::chrono::milliseconds limit) : limit_(limit) {}

  enum class Finding {
    Quiet,
    Underway,
    Lost
  };  // nothing on its way; something; something for too long
  Finding look(int socket);
  std::chrono::milliseconds pause() const { return limit_ / 4; }  // between two looks

 private:
  std::chrono::milliseconds limit_;
  std::optional<Deadline::Clock::time_point>
      since_;  // of the first look that found bytes unanswered, and no answer after
};

}  // namespace weft::transport::tcp
