// SPDX-License-Identifier: Apache-2.0
// Records which groups of this process have broken, and by which error. A group that breaks writes
// its dump at once, when its operations are still open although they are about to fail; the dump
// says so by this record.
//
// Callable from any thread. Nothing here allocates, so that a dump can be written in a forked copy
// of a process that has crashed.
#pragma once

#include <array>
#include <optional>

#include <weft/base/error.h>
#include <weft/profiling/trace/description.h>
#include <weft/profiling/trace/flight_recorder.h>

namespace weft::trace {

struct Breakage {
  Blame blame{};
  std::array<char, kErrorBytes> error{};  // cut to that size; ends with 0
};

// The latest so many are kept.
constexpr std::size_t kMostBreakages = 64;

// Called once for a group, before its dump is written and its operations fail.
void record_breakage(const Member& member, const Error& why) noexcept;
// None if the group has not broken, or long ago.
std::optional<Breakage> breakage_of(const Member& member) noexcept;

}  // namespace weft::trace
