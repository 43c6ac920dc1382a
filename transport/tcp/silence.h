// SPDX-License-Identifier: Apache-2.0
// Detects that a peer has fallen silent: bytes are in transit to it and its kernel has acknowledged
// nothing for Settings::silence. Call look() now and then, on one thread. The kernel itself would
// wait a quarter of an hour or, with TCP_USER_TIMEOUT, take a peer for dead that answers but has no
// room.
#pragma once

#include <optional>

#include <weft/base/deadline.h>

namespace weft::transport::tcp {

class Silence {
 public:
  explicit Silence(std::chrono::milliseconds limit) : limit_(limit) {}

  // Quiet: nothing is in transit. Underway: bytes are. Lost: they have been for too long.
  enum class Finding { Quiet, Underway, Lost };
  Finding look(int socket);
  std::chrono::milliseconds pause() const { return limit_ / 4; }  // between two calls of look()

 private:
  std::chrono::milliseconds limit_;
  // Time of the first look() that found unanswered bytes; an answer resets it.
  std::optional<Deadline::Clock::time_point> since_;
};

}  // namespace weft::transport::tcp
