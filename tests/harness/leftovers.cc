// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <iterator>
#include <mutex>

#include <malloc.h>

#include <weft/tests/harness/leftovers.h>
#include <weft/tests/harness/sanitized.h>

#ifdef WEFT_TEST_SANITIZED
// Declared here, because only clang has its header.
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();
#endif

namespace weft::harness {

std::size_t live_bytes() {
#ifdef WEFT_TEST_SANITIZED
  return __sanitizer_get_current_allocated_bytes();
#else
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
#endif
}

std::ptrdiff_t open_descriptors() {
  static std::mutex counting;
  std::lock_guard lock(counting);
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

}  // namespace weft::harness
