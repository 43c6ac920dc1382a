// SPDX-License-Identifier: Apache-2.0
// One timeline of all ranks. Threads write events into buffers of their own; a thread of the
// timeline moves them into this process's part, a file beside the timeline's. When a process ends
// and no other process writes a part any more, it merges the parts into one file in Chrome's trace
// format (merge.h): so the last process merges, whichever that is. The part of a rank that died
// holds its events until a moment before.
//
// Off until join(). Callable from any thread; the functions that record events neither block nor
// throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weft/base/error.h>
#include <weft/profiling/trace/description.h>
#include <weft/profiling/trace/timeline_data.h>

namespace weft::trace::timeline {

namespace detail {
inline std::atomic<bool> is_on{false};
}

inline bool on() noexcept { return detail::is_on.load(std::memory_order_relaxed); }

// Ranges of the calling thread nest.
void push(const Label& label) noexcept;
void pop() noexcept;
void mark(const Label& label) noexcept;
// The beginning and the end of an operation, by its ticket.
void begin(std::uint64_t ticket, const Member& member, Kind kind, const trace::About& about,
           std::int64_t time) noexcept;
void end(std::uint64_t ticket, std::int64_t time, const Error* error, int peer,
         std::uint64_t sequence) noexcept;
// Arrows (trace::Arrow): leave() begins one in the present range of this thread and arrive() ends
// one there; arrive_from() draws one to there from an operation.
std::uint64_t next_arrow() noexcept;
void leave(std::uint64_t arrow) noexcept;
void arrive(std::uint64_t arrow) noexcept;
void arrive_from(std::uint64_t ticket) noexcept;

// A source of device spans (cuda/span.h). The timeline's thread calls collect(), ten times a second
// and at the end, for the spans that have ended since the last call.
class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;
  virtual void collect(const std::function<void(const DeviceSpan&)>& take) noexcept = 0;
};
// Adds a source, for this timeline and for one that begins later.
void ask(std::shared_ptr<Source> source);

// Begins to collect events for `file`. A second call for that file changes nothing: a process has
// one part, under the first job's name; if a later job has more ranks, that is a warning, once. A
// relative name refers to the process's folder at the first call, also if the process changes its
// folder later. Throws Caller if the part cannot be written, Busy if its thread cannot be started,
// and the errors of require().
void join(const std::string& file, const ProcessInJob& place);
// Sets the clock at the end; the drift since the start is taken to be even. The last call counts.
// Does nothing without a timeline.
void measured_again(const Clock& clock) noexcept;
// Throws Caller if this process already makes a timeline in another file, or if `file` cannot be
// one because it is a folder or a device.
void require(const std::string& file);
// Writes the remaining events, and merges the parts if no other process writes one. Runs when the
// process ends by exit(); a process that ends by _exit() calls it first. Later events are lost.
void finish() noexcept;

// The absolute path of the timeline to which this process contributes, or "" without one.
std::string own_file();
// The file of this process's part, or "" without a timeline.
std::string own_part();
// Writes the remaining events and ends the part as finish() does, but does not merge: the caller
// must have it merged. Returns the part's file, or "" if there is none. Throws if writing fails.
std::string end_part();

}  // namespace weft::trace::timeline
