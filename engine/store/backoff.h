// The pause between two looks at something that nobody announces (a port that is not open yet, a
// key that is not set): short at first, longer for what takes long, because a thousand ranks may be
// looking at one. It is at most a fourth of the time waited so far, a twentieth where that is long,
// and each is shortened by chance, since those thousand often begin at one moment.
#pragma once

#include <algorithm>
#include <chrono>
#include <random>

#include <poll.h>

#include <weft/base/deadline.h>

namespace weft::group {

class Backoff {
 public:
  // For a question over a connection that is there.
  Backoff() = default;
  // For a look that costs the other side more: a connection of its own.
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
  // How long that pause is, which counts as waited. Less than a second.
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

  std::chrono::milliseconds longest_{50};  // while the waiting is not long yet
  std::chrono::nanoseconds next_{50'000};
  std::chrono::nanoseconds waited_{0};
  std::minstd_rand random_{std::random_device()()};
};

}  // namespace weft::group
