// SPDX-License-Identifier: Apache-2.0
// weft::Range: a named range of a program's own, beside Weft's.
#pragma once

#include <memory>
#include <string_view>

#include <weft/base/export.h>

namespace weft {

// A range of this thread, from construction to destruction: in the timeline, in Nsight Systems (the
// NVTX domain "weft.user"), in libtorch's profiler, and while it is open in dumps of the flight
// recorder. Shows the host's time, not the device's.
// Ranges of one thread nest, and end on the thread that made them.
//
//   const weft::Range range("forward");
//
// Each different name is kept as long as the process lives: "step", not "step 17".
class [[nodiscard]] WEFT_API Range {
 public:
  // Begins the range. Copies the name.
  explicit Range(std::string_view name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace weft
