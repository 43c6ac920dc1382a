// SPDX-License-Identifier: Apache-2.0
// Waits on the host for something that is not signalled: an event, or a word that a GPU writes.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include <weft/base/deadline.h>
#include <weft/base/futex.h>
#include <weft/base/timer_slack.h>

namespace weft::cuda {

// Calls passed() until it is true or the deadline passes; returns false at the deadline. Spins
// briefly, then polls at growing intervals of at most 200 µs.
template <class Passed>
bool poll_until(const Passed& passed, Deadline deadline) noexcept {
  constexpr int kSpins = 200;
  constexpr auto kLongestPause = std::chrono::microseconds(200);
  for (int i = 0; i < kSpins; ++i) {
    if (passed()) return true;
    spin_pause();
  }
  const NoTimerSlack exact;
  auto pause = std::chrono::nanoseconds(2000);
  while (!passed()) {
    const auto now = Deadline::Clock::now();
    if (now >= deadline.point()) return false;
    std::this_thread::sleep_until(
        std::min<Deadline::Clock::time_point>(now + pause, deadline.point()));
    pause = std::min<std::chrono::nanoseconds>(2 * pause, kLongestPause);
  }
  return true;
}

}  // namespace weft::cuda
