// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/call/lifetime.h>

namespace weft::call {

void Lifetime::require_own() const {
  if (is_inherited()) made_in_.throw_inherited("agent " + describe(self_));
}

void Lifetime::require_open() const {
  require_own();
  if (!closed_) return;
  if (taken_for_lost_) throw why_gone();
  throw Error(
      Blame::Caller,
      "agent " + describe(self_) +
          " is not initialized any more: it has shut down or left, and is used after deletion; "
          "make calls before that, or with another agent with rpc::init");
}

bool Lifetime::taken_for_lost(const std::string& why) {
  if (taken_for_lost_) return false;
  why_left_ = "others have taken it for lost: " + why;
  taken_for_lost_ = true;
  return true;
}

Error Lifetime::why_gone() const {
  if (taken_for_lost_)
    return {Blame::PeerLost, "agent " + describe(self_) + " has left: " + why_left_};
  return {Blame::Cancelled, "the agent has left"};
}

void Lifetime::keep_until_left(std::shared_ptr<const void> kept) {
  MutexLock lock(mutex_);
  kept_until_left_.swap(kept);
}

}  // namespace weft::call
