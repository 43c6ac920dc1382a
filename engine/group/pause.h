// The pause between two looks at something that nobody announces (a port that is not open yet, a key that is not set):
// short at first, up to 50 ms for what takes long, because a thousand ranks may be looking at one.
#pragma once

#include <algorithm>
#include <chrono>

#include <poll.h>

#include <weft/base/deadline.h>

namespace weft::group {

class Pause {
 public:
  // Blocks for the next pause, or until the deadline.
  void wait(Deadline deadline) {
    const auto remaining = deadline.remaining();
    const auto left = remaining > kLongest ? next_ : std::min<std::chrono::nanoseconds>(next_, remaining);
    const timespec limit{0, static_cast<long>(left.count())};
    ::ppoll(nullptr, 0, &limit, nullptr);
    next_ = std::min<std::chrono::nanoseconds>(next_ * 5 / 4, kLongest);
  }

 private:
  static constexpr std::chrono::milliseconds kLongest{50};
  std::chrono::nanoseconds next_{50'000};
};

}  // namespace weft::group
