// SPDX-License-Identifier: Apache-2.0
// Timer slack: how late the kernel may end a thread's sleep, so that one wake-up serves several
// threads. The default is 50 µs.
#pragma once

namespace weft {

// While it lives, this thread's sleeps end on time. It costs two system calls, so it is for sleeps
// of microseconds.
class NoTimerSlack {
 public:
  NoTimerSlack() noexcept;
  ~NoTimerSlack();
  NoTimerSlack(const NoTimerSlack&) = delete;
  NoTimerSlack& operator=(const NoTimerSlack&) = delete;

 private:
  int former_;  // nanoseconds; -1 if the kernel or a sandbox does not report it
};

}  // namespace weft
