// What this process has done so far, as numbers that another process may read: weft-run --status
// gives each rank a page of a file (WEFT_STATUS_FILE) and reads it; without one the numbers stay
// here.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace weft::trace {

// The page as it lies in the file.
struct Progress {
  static constexpr std::uint64_t kMagic = 0x3254415453544657;  // "WFTSTAT2"
  std::atomic<std::uint64_t> magic{0};
  std::atomic<std::uint64_t> steps{0};
  std::atomic<std::uint64_t> operations{0};  // that have ended
  std::atomic<std::uint64_t> bytes{0};       // of those
  std::atomic<std::uint64_t> failures{0};

  // What host_time.h counts. Whoever reads a page takes no name for text that ends, and no number
  // for a place, unchecked.
  static constexpr std::size_t kBackends = 8;
  static constexpr std::size_t kName = 16;
  struct Backend {
    std::array<std::atomic<char>, kName> name{};  // ends with 0
    std::atomic<std::uint64_t> waited{0};         // nanoseconds, until the last change
  };
  std::array<Backend, kBackends> backends{};
  std::atomic<std::int64_t> waiting_since{
      0};  // by CLOCK_MONOTONIC, nanoseconds; 0: it does not wait now
  std::atomic<std::uint64_t> waiting_for{0};  // the place of the backend for which it does
};

Progress& progress() noexcept;

// What this machine calls itself; "unknown" where it does not tell.
std::string host_name();

// Counts in that file's first page from now on; again for the same file does nothing. Throws Caller
// where it cannot be mapped, or holds something else.
void publish_progress(const char* file);

}  // namespace weft::trace
