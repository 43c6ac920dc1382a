// SPDX-License-Identifier: Apache-2.0
// Records which transports lead from this process's ranks to the others of their groups. Dumps and
// the timeline show it.
//
// Callable from any thread. Nothing here allocates, as in breakage.h.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include <weft/profiling/trace/description.h>

namespace weft::trace {

constexpr std::size_t kTransportsBytes = 256;
// The latest so many groups are kept.
constexpr std::size_t kMostTransports = 256;

using TransportsText = std::array<char, kTransportsBytes>;  // ends with 0

// Replaces what was recorded for the group before. `text` ("shm to rank 1; tcp to ranks 2, 3")
// is cut to kTransportsBytes - 1.
void record_transports(const Member& member, std::string_view text) noexcept;
// None if nothing was recorded for the group, or long ago.
std::optional<TransportsText> transports_of(const Member& member) noexcept;

}  // namespace weft::trace
