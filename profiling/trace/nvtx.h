// SPDX-License-Identifier: Apache-2.0
// Passes ranges, marks and operations to a tool by NVTX. Internal to profiling/trace. Does nothing
// without NVTX's headers or without a tool.
#pragma once

#include <cstdint>

#include <weft/profiling/trace/description.h>
#include <weft/profiling/trace/name.h>

namespace weft::trace::nvtx {

#if WEFT_HAVE_NVTX
void push(Name& name, const Payload* payload) noexcept;
void pop(Layer layer) noexcept;
void mark(Name& name, const Payload* payload) noexcept;
// Starts a range of the engine for an operation; it may end on another thread. Returns 0 without a
// tool.
std::uint64_t start(const Member& member, Kind kind, const About& about) noexcept;
void stop(std::uint64_t range) noexcept;
#else
inline void push(Name&, const Payload*) noexcept {}
inline void pop(Layer) noexcept {}
inline void mark(Name&, const Payload*) noexcept {}
inline std::uint64_t start(const Member&, Kind, const About&) noexcept { return 0; }
inline void stop(std::uint64_t) noexcept {}
#endif

}  // namespace weft::trace::nvtx
