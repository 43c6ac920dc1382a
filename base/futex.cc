// SPDX-License-Identifier: Apache-2.0
#include <ctime>

#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/base/futex.h>

namespace weft {

void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t value,
                Deadline deadline) noexcept {
  timespec left{};
  timespec* limit = nullptr;
  if (!deadline.is_never()) {
    const auto nanoseconds =
        std::chrono::nanoseconds(deadline.point() - Deadline::Clock::now()).count();
    if (nanoseconds <= 0) return;
    left = {static_cast<time_t>(nanoseconds / 1'000'000'000),
            static_cast<long>(nanoseconds % 1'000'000'000)};
    limit = &left;
  }
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, limit, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>* word) noexcept {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace weft
