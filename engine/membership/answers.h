// SPDX-License-Identifier: Apache-2.0
// The Completed frames that wait to leave over one link. Those of several ranks for the same leaver
// leave as one frame: a thousand ranks that leave a group at once are sent a million answers, most
// of which pass the root of the tree. For the thread of the job's loop.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <weft/engine/membership/frame.h>

namespace weft::group {

class Answers {
 public:
  // The frame's ranks are in range (FrameReader).
  void add(const Frame& completed);
  // Returns the bytes of all frames, and forgets them.
  std::string take();

 private:
  // The ranks that answer, by the group and the leaver.
  std::map<std::pair<std::string, std::uint64_t>, std::vector<int>> waiting_;
};

}  // namespace weft::group
