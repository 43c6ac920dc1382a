// SPDX-License-Identifier: Apache-2.0
// The growing pause between two attempts to see something that nobody announces (a port that is not
// open yet, a key that is not set). Short at first, and longer for long waits, because a thousand
// ranks may poll the same thing. A pause is at most a fourth of the time waited so far, a twentieth
// in long waits. Each is shortened at random, since those thousand ranks often begin at the same
// moment.
#pragma once

#include <algorithm>
#include <chrono>
#include <random>

#include <poll.h>

#include <weft/base/deadline.h>

namespace weft::group {

class Backoff {
 public:
  // For queries over an existing connection.
  Backoff() = default;
  // For attempts that cost the other side more: a new connection each.
  static Backoff between_connections() { return Backoff(kLongest); }

  // Blocks for the next pause, or until the deadline.
  void wait(Deadline deadline) {
    const auto remaining = deadline.remaining();
    const auto some = next();
    const auto left =
        remaining > kLongest ? some : std::min<std::chrono::nanoseconds>(some, remaining);
    const timespec limit{0, static_cast<long>(left.count())};
    ::ppoll(nullptr, 0, &limit, nullptr);
  }
  // Returns the length of the next pause and counts it as waited. Less than a second.
  std::chrono::nanoseconds next() {
    const auto some = std::chrono::nanoseconds(
        std::uniform_int_distribution<long>(next_.count() / 2, next_.count())(random_));
    waited_ += some;
    next_ = std::min(next_ * 5 / 4,
                     std::clamp<std::chrono::nanoseconds>(waited_ / 20, longest_, kLongest));
    return some;
  }

 private:
  static constexpr std::chrono::milliseconds kLongest{500};
  explicit Backoff(std::chrono::milliseconds longest) : longest_(longest) {}

  // Limit of a pause, until a twentieth of the time waited is longer.
  std::chrono::milliseconds longest_{50};
  std::chrono::nanoseconds next_{50'000};
  std::chrono::nanoseconds waited_{0};
  std::minstd_rand random_{std::random_device()()};
};

}  // namespace weft::group
