// SPDX-License-Identifier: Apache-2.0
#include <sys/prctl.h>

#include <weft/base/timer_slack.h>

namespace weft {

// 1 ns is the least: 0 would restore the thread's initial slack. (A thread with a real-time policy
// has no slack and reports 0.)
NoTimerSlack::NoTimerSlack() noexcept : former_(prctl(PR_GET_TIMERSLACK)) {
  prctl(PR_SET_TIMERSLACK, 1UL);
}

NoTimerSlack::~NoTimerSlack() {
  if (former_ >= 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(former_));
}

}  // namespace weft
