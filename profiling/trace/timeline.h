// One timeline of all ranks. Threads write events into buffers of their own; a thread of the
// timeline moves them into this process's part, a file beside the one that was asked for. When a
// process ends and no other part's writer lives, it merges the parts into one file in Chrome's
// trace format (merge.h): the last one does, whoever that is, and a rank that died has left what it
// had written until a moment before.
//
// Off until join(). Usable from every thread; the events' functions neither block nor throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>

namespace weft::trace::timeline {

namespace detail {
inline std::atomic<bool> is_on{false};
}

inline bool on() noexcept { return detail::is_on.load(std::memory_order_relaxed); }

// What a range or mark shows. `text` has static lifetime.
struct Label {
  const char* text = "";
  Layer layer = Layer::User;
  std::uint64_t bytes = 0;
  int rank = -1;  // whose it is, where a process has several
};

// Ranges of the calling thread nest.
void push(const Label& label) noexcept;
void pop() noexcept;
void mark(const Label& label) noexcept;
// An operation, by its ticket.
void begin(std::uint64_t ticket, const Member& member, Kind kind, const trace::About& about,
           std::int64_t time) noexcept;
void end(std::uint64_t ticket, std::int64_t time, const Error* error, int peer,
         std::uint64_t sequence) noexcept;
// Arrows (trace::Arrow): from the range that this thread is in, and to it; to it from an operation.
std::uint64_t next_arrow() noexcept;
void leave(std::uint64_t arrow) noexcept;
void arrive(std::uint64_t arrow) noexcept;
void arrive_from(std::uint64_t ticket) noexcept;

// What a device did, by now()'s clock, both ends wrong by at most `error` nanoseconds.
struct DeviceSpan {
  int device = 0;
  std::uint64_t stream = 0;  // equal for what ran on one
  Label label;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t error = 0;
  std::uint64_t arrow = 0;  // that arrives at its beginning
};
// Where such spans come from (cuda/span.h). Asked by the timeline's thread, ten times a second and
// at the end, for those that have ended since.
class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;
  virtual void collect(const std::function<void(const DeviceSpan&)>& take) noexcept = 0;
};
// From now on, also by a timeline that begins later.
void ask(std::shared_ptr<Source> source);

// How this process's clock relates to that of the job: job time = now() + offset, wrong by at most
// `error` when it was measured. Nanoseconds.
struct Clock {
  std::int64_t offset = 0;
  std::int64_t error = 0;
  std::int64_t at = 0;  // when, as now(); clocks drift
};

// Who a process is in the job.
struct Place {
  std::string
      job;  // what its processes agree on; parts of other jobs in the same folder are left-overs
  int rank = 0;
  int ranks = 1;
  Clock clock;  // at the start
};

// Begins to collect, for `file`. A second call for that file changes nothing: a process has one
// part, and the first job's name; that a later job has more ranks is a warning, once. A relative
// name is of the folder that the process is in at the first call, also where it goes to another one
// later. Throws Caller where the part cannot be written, Busy where there is no thread for it, and
// what require() throws.
void join(const std::string& file, const Place& place);
// The clock at the end: in between it is taken to have drifted evenly. Nothing without a timeline;
// the last one counts.
void measured_again(const Clock& clock) noexcept;
// Throws Caller where this process makes a timeline already, and for another file, and where the
// file cannot be one: it is a folder or a device.
void require(const std::string& file);
// Writes what is left, and merges where no other process still writes. Called when the process ends
// by exit(); a process that ends by _exit() calls it first. Later events are lost.
void finish() noexcept;

// The timeline that this process has a part of, absolute; "" without one.
std::string own_file();
// The file that this process writes its part to; "" without a timeline.
std::string own_part();
// Writes what is left and ends the part as finish() does, and leaves it as it is: whoever calls
// this sees to it that it is merged. Returns it; "" where there is none. Throws what writing
// throws.
std::string end_part();

// Of a part; events beyond are lost, and counted.
constexpr std::uint64_t kMostPart = std::uint64_t{256} << 20;  // bytes

// Where the parts of a timeline lie until they are merged.
inline std::string folder_of_parts(const std::string& file) { return file + ".parts"; }

// "3f2a…": the machine and its clock. Processes with equal ones have equal now().
std::string host_identity();

}  // namespace weft::trace::timeline
