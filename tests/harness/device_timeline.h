// SPDX-License-Identifier: Apache-2.0
// A timeline for one test, with one rank, and the GPU spans in it (cuda/span.h). Fake GPUs must
// live until ended() has returned. One at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <weft/tests/harness/folder.h>

namespace weft::harness {

class DeviceTimeline {
 public:
  DeviceTimeline();
  ~DeviceTimeline();
  DeviceTimeline(const DeviceTimeline&) = delete;
  DeviceTimeline& operator=(const DeviceTimeline&) = delete;

  struct Shown {
    int device = 0;
    int rank = -1;
    std::string name;
    std::string layer;
    std::uint64_t bytes = 0;
    std::int64_t begin = 0;  // in the time of trace::now()
    std::int64_t end = 0;
    std::int64_t error = 0;
  };
  // Waits until the timeline has `count` spans and ends it. Returns all spans, sorted by their
  // begin. (ctest's time limit ends the wait.)
  std::vector<Shown> ended(std::size_t count);
  // The same, each as "copy to host: 4 bytes".
  std::vector<std::string> names(std::size_t count);
  // After ended(): the timeline's arrows to GPU spans, sorted, each as "outer range > inner range
  // -> copy to host". An arrow that starts in no range has nothing before its "->".
  std::vector<std::string> arrows() const;

 private:
  std::vector<Shown> read(const std::string& part) const;

  const Folder folder_;
  const std::string file_ = folder_.path() + "/run.json";
};

}  // namespace weft::harness
