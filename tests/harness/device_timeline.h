// A timeline of a test's own, with one rank, and what stands in it of GPUs (cuda/span.h): also of
// fake ones, which must live until ended() has returned. One at a time.
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
    std::int64_t begin = 0;  // as trace::now()
    std::int64_t end = 0;
    std::int64_t error = 0;
  };
  // Ends the timeline when it has so many (ctest's time limit ends the waiting); all there are
  // then, by their beginnings.
  std::vector<Shown> ended(std::size_t count);
  // The same, each as "copy to host: 4 bytes".
  std::vector<std::string> names(std::size_t count);
  // After ended(): its arrows to what GPUs did, each as "outer range > inner range -> copy to
  // host", sorted. An arrow that begins in no range has nothing before its "->".
  std::vector<std::string> arrows() const;

 private:
  std::vector<Shown> read(const std::string& part) const;

  const Folder folder_;
  const std::string file_ = folder_.path() + "/run.json";
};

}  // namespace weft::harness
