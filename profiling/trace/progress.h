// What this process has done so far, as numbers that another process may read: weft-run --status gives each rank a page of
// a file (WEFT_STATUS_FILE) and reads it; without one the numbers stay here.
#pragma once

#include <atomic>
#include <cstdint>

namespace weft::trace {

// The page as it lies in the file.
struct Progress {
  static constexpr std::uint64_t kMagic = 0x3154415453544657;  // "WFTSTAT1"
  std::atomic<std::uint64_t> magic{0};
  std::atomic<std::uint64_t> steps{0};
  std::atomic<std::uint64_t> operations{0};  // that have ended
  std::atomic<std::uint64_t> bytes{0};       // of those
  std::atomic<std::uint64_t> failures{0};
};

Progress& progress() noexcept;

// Counts in that file's first page from now on; again for the same file does nothing. Throws Caller where it cannot be
// mapped, or holds something else.
void publish_progress(const char* file);

}  // namespace weft::trace
