// SPDX-License-Identifier: Apache-2.0
// Blocks on a 32-bit word with a deadline, which std::atomic::wait does not have.
#pragma once

#include <atomic>
#include <cstdint>

#include <weft/base/deadline.h>

namespace weft {

// Blocks while *word == value, until woken or until the deadline passes. It may return early, so
// check the word again.
void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t value,
                Deadline deadline) noexcept;
void futex_wake_all(const std::atomic<std::uint32_t>* word) noexcept;

// Tells the processor that this is a spin loop.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace weft
