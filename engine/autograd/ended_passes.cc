// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/autograd/ended_passes.h>

namespace weft::autograd {

void EndedPasses::note(PassId pass, const Outcome& outcome) {
  if (ended_.insert_or_assign(pass, outcome).second) endings_.push_back(pass);
  if (endings_.size() > kRemembered) {
    ended_.erase(endings_.front());
    endings_.pop_front();
  }
}

const Outcome* EndedPasses::find(PassId pass) const {
  const auto found = ended_.find(pass);
  return found == ended_.end() ? nullptr : &found->second;
}

}  // namespace weft::autograd
