// SPDX-License-Identifier: Apache-2.0
// The data that a timeline collects and writes, and the names of its files (timeline.h).
#pragma once

#include <cstdint>
#include <string>

#include <weft/profiling/trace/description.h>
#include <weft/profiling/trace/name.h>

namespace weft::trace::timeline {

// The text and figures of a range or mark. `text` has static lifetime.
struct Label {
  const char* text = "";
  Layer layer = Layer::User;
  std::uint64_t bytes = 0;
  int rank = -1;  // the rank that it belongs to, if a process has several
};

// A span of a device's work, in the time of now(); begin and end may each be off by `error`
// nanoseconds.
struct DeviceSpan {
  int device = 0;
  std::uint64_t stream = 0;  // equal for spans of one stream
  Label label;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t error = 0;
  std::uint64_t arrow = 0;  // the arrow that ends at its beginning; 0: none
};
// How this process's clock relates to that of the job: job time = now() + offset, off by at most
// `error` when it was measured. Nanoseconds.
struct Clock {
  std::int64_t offset = 0;
  std::int64_t error = 0;
  std::int64_t at = 0;  // when it was measured, by now(); clocks drift
};

// A process's place in the job.
struct ProcessInJob {
  // The name on which the job's processes agree; parts of other jobs in the same folder are
  // leftovers.
  std::string job;
  int rank = 0;
  int ranks = 1;
  Clock clock;  // the clock at the start
};

// The size limit of a part; later events are lost, and counted.
constexpr std::uint64_t kMostPart = std::uint64_t{256} << 20;  // bytes

// The folder of a timeline's parts until they are merged.
inline std::string folder_of_parts(const std::string& file) { return file + ".parts"; }

// Identifies the machine and its clock ("3f2a…"). Processes with equal identities share now().
std::string host_identity();

}  // namespace weft::trace::timeline
