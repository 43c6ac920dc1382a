#include <sys/prctl.h>

#include <weft/base/timer_slack.h>

namespace weft {

namespace {

constexpr unsigned long kLeast = 1;  // 0 stands for what the thread began with

}  // namespace

NoTimerSlack::NoTimerSlack() noexcept : former_(prctl(PR_GET_TIMERSLACK)) { prctl(PR_SET_TIMERSLACK, kLeast); }

// A thread of a real-time policy has none, and says 0.
NoTimerSlack::~NoTimerSlack() {
  if (former_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(former_));
}

}  // namespace weft
