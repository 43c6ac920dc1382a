// SPDX-License-Identifier: Apache-2.0
// Ranges and marks of threads, for Nsight Systems (an NVTX domain for each layer, such as
// "weft.engine") and for the timeline (timeline.h). Without a tool and without a timeline, a range
// costs two calls that check a flag and return; with WEFT_TRACE=OFF it is an empty object without
// calls. An activity that begins on one thread and may end on another is an Operation
// (operation.h).
//
//   constinit trace::Name kAllReduce{trace::Layer::Transport, "all_reduce"};
//   trace::Range range(kAllReduce, {.bytes = slice.bytes, .rank = rank, .ranks = ranks});
//
// Everything may be used from any thread; a Range begins and ends on one thread and shows the
// host's time there, not the device's. Nothing here blocks or throws.
#pragma once

#include <cstdint>

#include <weft/profiling/trace/name.h>

namespace weft::trace {

// Two namespaces for the same types, so that a program may mix objects that were compiled with and
// without tracing.
#if WEFT_TRACE_ENABLED
inline namespace enabled {

// A range of this thread, from construction to destruction. Ranges of one thread nest.
class [[nodiscard]] Range {
 public:
  explicit Range(Name& name) noexcept;
  Range(Name& name, const Payload& payload) noexcept;
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const Layer layer_;
};

// Marks a point in time of this thread.
void mark(Name& name) noexcept;
void mark(Name& name, const Payload& payload) noexcept;

// An arrow of the timeline, from the present range of one thread to a later range of this or
// another thread: from a cause to what it started. Does nothing without a timeline.
class Arrow {
 public:
  Arrow() = default;  // no arrow
  static Arrow leave() noexcept;
  void arrive() const noexcept;
  std::uint64_t id() const { return id_; }  // 0: none

 private:
  std::uint64_t id_ = 0;
};

}  // namespace enabled
#else
inline namespace disabled {

class [[nodiscard]] Range {
 public:
  constexpr explicit Range(Name&) noexcept {}
  constexpr Range(Name&, const Payload&) noexcept {}
  constexpr ~Range() {}
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

constexpr void mark(Name&) noexcept {}
constexpr void mark(Name&, const Payload&) noexcept {}

class Arrow {
 public:
  static constexpr Arrow leave() noexcept { return {}; }
  constexpr void arrive() const noexcept {}
  static constexpr std::uint64_t id() { return 0; }
};

}  // namespace disabled
#endif

}  // namespace weft::trace
