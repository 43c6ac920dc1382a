// SPDX-License-Identifier: Apache-2.0
// Records what a process communicates, one operation at a time: collectives, messages, meetings
// over the store, calls, references, backward passes. The code that runs an operation reports its
// beginning and its end here. The flight recorder (always), the timeline, the NVTX ranges of an
// attached tool and the metrics follow from these reports.
//
//   const trace::Member member = trace::Member::join(
//       {.kind = "group", .name = "default", .rank = 0, .ranks = {0, 1}});
//   trace::Operation traced = trace::Operation::begin(
//       member, trace::Kind::Collective, {.name = "all_reduce", .sequence = 7});
//   …
//   traced.end();  // or traced.fail(error), on any thread; only the first call counts.
//                  // Of several copies of an Operation, end only one.
//
// Everything may be used from any thread. begin, end and fail neither block nor throw, and allocate
// only for the timeline.
#pragma once

#include <cstddef>
#include <cstdint>

#include <weft/base/error.h>
#include <weft/profiling/trace/description.h>

namespace weft::trace {

class Operation {
 public:
  Operation() = default;  // no operation; ending it does nothing
  static Operation begin(const Member& member, Kind kind, const About& about) noexcept;
  // Records that it succeeded. Pass `peer`, the sender, and `sequence`, the message's number, if
  // they became known only now.
  void end() noexcept { end(-1, 0); }
  void end(int peer, std::uint64_t sequence) noexcept;
  void fail(const Error& error) noexcept;
  // Adds bytes to those that it began with, such as the result of a call. Call it before the end.
  void add(std::uint64_t bytes) noexcept { more_ += bytes; }
  // Says that the thread's present range works for this operation: the timeline draws an arrow from
  // the operation to the range, and the flight recorder knows that a call that is served runs.
  void runs_here() const noexcept;
  // Records an operation that has no duration.
  static void note(const Member& member, Kind kind, const About& about) noexcept {
    begin(member, kind, about).end();
  }

 private:
  void finish(const Error* error, int peer, std::uint64_t sequence) noexcept;
  const char* name_ = "";
  std::uint64_t ticket_ = 0;  // its record in the flight recorder; 0: none
  std::uint64_t range_ = 0;   // of NVTX; 0: none
  std::uint64_t bytes_ = 0;
  std::uint64_t more_ = 0;
  std::int64_t begun_ = 0;
  Kind kind_ = Kind::Collective;
  bool open_ = false;
  bool watched_ = false;  // the observer was told that it began
};

// Receives the beginning and the end of each operation, on the thread where it happens: its
// functions must be fast and must not throw.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;
  virtual void begun(const Member& member, Kind kind, const char* name,
                     std::uint64_t bytes) noexcept = 0;
  // `more`: the bytes that were added to those it began with.
  virtual void ended(Kind kind, const char* name, double seconds, const Error* error,
                     std::uint64_t more) noexcept = 0;
};
// Sets the observer of this process, for operations that begin from now on; a forked process has
// none. A second call is a broken invariant.
void observe(Observer& observer) noexcept;

// Records that a training step begins on this thread: counts it (progress.h), and marks it for the
// timeline and tools. `rank` is -1 if it is not known.
void step(int rank) noexcept;

}  // namespace weft::trace
