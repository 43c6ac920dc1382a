// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <weft/base/large_copy.h>

namespace weft {

#if defined(__x86_64__)

void copy_past_caches(void* to, const void* from, std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64, kVector = sizeof(__m128i), kAhead = 512;
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  // Only whole cache lines are written past the caches.
  const std::size_t front = std::min(bytes, -reinterpret_cast<std::uintptr_t>(out) % kLine);
  if (front > 0) std::memcpy(out, in, front);
  const std::size_t end = front + (bytes - front) / kLine * kLine;
  for (std::size_t at = front; at < end; at += kLine) {
    __m128i line[kLine / kVector];
    _mm_prefetch(in + at + kAhead, _MM_HINT_NTA);  // may lie behind the end
    for (std::size_t i = 0; i < kLine / kVector; ++i)
      line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at) + i);
    for (std::size_t i = 0; i < kLine / kVector; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at) + i, line[i]);
  }
  _mm_sfence();  // otherwise another thread might read a flag that is set later before these bytes
  if (end < bytes) std::memcpy(out + end, in + end, bytes - end);
}

#else

void copy_past_caches(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

void copy_part(void* to, const void* from, std::size_t bytes, std::size_t whole) noexcept {
  if (whole >= kLargeCopyBytes) {
    copy_past_caches(to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace weft
