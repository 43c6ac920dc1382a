// The pause between two looks at something that nobody announces (a port that is not open yet, a key that is not set):
// short at first, longer for what takes long, because a thousand ranks may be looking at one. It is at most a fourth of the
// time waited so far, and each is shortened by chance, since those thousand often begin at one moment.
#pragma once

#include <algorithm>
#include <chrono>
#include <random>

#include <poll.h>

#include <weft/base/deadline.h>

namespace weft::group {

class Pause {
 public:
  // For a question over a connection that is there.
  Pause() = default;
  // For a look that costs the other side more: a connection of its own.
  static Pause between_connections() { return Pause(std::chrono::milliseconds(500)); }

  // Blocks for the next pause, or until the deadline.
  void wait(Deadline deadline) {
    const auto remaining = deadline.remaining();
    const auto some =
        std::chrono::nanoseconds(std::uniform_int_distribution<long>(next_.count() / 2, next_.count())(random_));
    const auto left = remaining > longest_ ? some : std::min<std::chrono::nanoseconds>(some, remaining);
    const timespec limit{0, static_cast<long>(left.count())};
    ::ppoll(nullptr, 0, &limit, nullptr);
    next_ = std::min<std::chrono::nanoseconds>(next_ * 5 / 4, longest_);
  }

 private:
  explicit Pause(std::chrono::milliseconds longest) : longest_(longest) {}

  std::chrono::milliseconds longest_{50};
  std::chrono::nanoseconds next_{50'000};
  std::minstd_rand random_{std::random_device()()};
};

}  // namespace weft::group
