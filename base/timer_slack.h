// How late the kernel may end a thread's sleep, so that it wakes for several at once: 50 µs, unless
// told otherwise.
#pragma once

namespace weft {

// While it lives, this thread's sleeps end when they should. Two system calls, so for sleeps of
// microseconds.
class NoTimerSlack {
 public:
  NoTimerSlack() noexcept;
  ~NoTimerSlack();
  NoTimerSlack(const NoTimerSlack&) = delete;
  NoTimerSlack& operator=(const NoTimerSlack&) = delete;

 private:
  int former_;  // nanoseconds; -1 where the kernel or a sandbox does not tell
};

}  // namespace weft
