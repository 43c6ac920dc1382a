// SPDX-License-Identifier: Apache-2.0
// Counts what this process has done so far, in numbers that another process may read: weft-run
// --status gives each rank a page of a file (WEFT_STATUS_FILE) and reads it; without such a file
// the numbers stay in this process.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace weft::trace {

// The layout of the page in the file.
struct Progress {
  static constexpr std::uint64_t kMagic = 0x3254415453544657;  // "WFTSTAT2"
  std::atomic<std::uint64_t> magic{0};
  std::atomic<std::uint64_t> steps{0};
  std::atomic<std::uint64_t> operations{0};  // operations that have ended
  std::atomic<std::uint64_t> bytes{0};       // bytes of those operations
  std::atomic<std::uint64_t> failures{0};

  // The counts of host_time.h. A reader must check that a name ends and that an index is in range.
  static constexpr std::size_t kBackends = 8;
  static constexpr std::size_t kName = 16;
  struct Backend {
    std::array<std::atomic<char>, kName> name{};  // ends with 0
    std::atomic<std::uint64_t> waited{0};         // nanoseconds until the last change
  };
  std::array<Backend, kBackends> backends{};
  // CLOCK_MONOTONIC in nanoseconds; 0 if the process does not wait now.
  std::atomic<std::int64_t> waiting_since{0};
  // The index of the backend for which the process waits.
  std::atomic<std::uint64_t> waiting_for{0};
};

Progress& progress() noexcept;

// This machine's host name, or "unknown".
std::string host_name();

// Counts in the file's first page from now on; a second call for the same file does nothing. Throws
// Caller if the file cannot be mapped or holds something else.
void publish_progress(const char* file);

}  // namespace weft::trace
