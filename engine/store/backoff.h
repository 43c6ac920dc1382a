// SPDX-License-Identifier: Apache-2.0
// The growing pause between two attempts to see something that nobody announces (a port that is not
// open yet, a key that is not set). Short at first, later at most 20 ms, since all ranks wait for
// the last one. A pause is at most a fourth of the time waited so far. Each is shortened at random,
// because a thousand ranks often begin at the same moment.
#pragma once

#include <algorithm>
#include <chrono>
#include <random>

#include <poll.h>

#include <weft/base/deadline.h>

namespace weft::group {

class Backoff {
 public:
  Backoff() = default;
  // For questions to a name server, which serves others too.
  static Backoff between_lookups() { return Backoff(std::chrono::milliseconds(500)); }

  // Blocks for the next pause, or until the deadline.
  void wait(Deadline deadline) {
    const auto remaining = deadline.remaining();
    const auto some = next();
    const auto left =
        remaining > longest_ ? some : std::min<std::chrono::nanoseconds>(some, remaining);
    const timespec limit{0, static_cast<long>(left.count())};
    ::ppoll(nullptr, 0, &limit, nullptr);
  }
  // Returns the length of the next pause. Less than a second.
  std::chrono::nanoseconds next() {
    const auto some = std::chrono::nanoseconds(
        std::uniform_int_distribution<long>(next_.count() / 2, next_.count())(random_));
    next_ = std::min<std::chrono::nanoseconds>(next_ * 5 / 4, longest_);
    return some;
  }

 private:
  explicit Backoff(std::chrono::milliseconds longest) : longest_(longest) {}

  std::chrono::milliseconds longest_{20};
  std::chrono::nanoseconds next_{50'000};
  std::minstd_rand random_{std::random_device()()};
};

}  // namespace weft::group
