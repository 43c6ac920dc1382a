// SPDX-License-Identifier: Apache-2.0
// The ranges of a program (weft::Range) that are open at present. Dumps of the flight recorder have
// them: a rank that is late is mostly in one of them.
//
// Callable from any thread. Nothing here blocks, throws or uses a lock, so that a dump can be
// written in a forked copy of a process that has crashed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

namespace weft::trace {

// An open range of this thread, from construction to destruction. Beyond kMostOpenRanges of a
// process at once, ranges are not kept.
class [[nodiscard]] OpenRange {
 public:
  // `name` lives as long as the process.
  explicit OpenRange(const char* name) noexcept;
  ~OpenRange();
  OpenRange(const OpenRange&) = delete;
  OpenRange& operator=(const OpenRange&) = delete;

 private:
  const std::size_t slot_;
};

constexpr std::size_t kMostOpenRanges = 256;

struct OpenedRange {
  const char* name = nullptr;
  std::int64_t begun = 0;  // now()
};
// The open ranges of all threads of this process, those that began first before the others.
// Allocates only from `memory`.
std::pmr::vector<OpenedRange> open_ranges(std::pmr::memory_resource* memory);

}  // namespace weft::trace
