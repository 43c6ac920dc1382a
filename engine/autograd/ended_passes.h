// SPDX-License-Identifier: Apache-2.0
// How the last passes of one autograd context have ended on this worker. A message of such a pass
// that comes late is answered with that. Not thread-safe: Passes locks.
#pragma once

#include <deque>
#include <map>

#include <weft/engine/autograd/ids.h>

namespace weft::autograd {

class EndedPasses {
 public:
  // Replaces the outcome if the pass has ended before: a pass that has succeeded here may fail
  // elsewhere later.
  void note(PassId pass, const Outcome& outcome);
  // Null if the pass has not ended, or has been forgotten.
  const Outcome* find(PassId pass) const;

 private:
  static constexpr std::size_t kRemembered = 256;

  std::deque<PassId> endings_;  // the keys of `ended_`, the oldest first
  std::map<PassId, Outcome> ended_;
};

}  // namespace weft::autograd
