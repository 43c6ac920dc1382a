// SPDX-License-Identifier: Apache-2.0
// Whether an agent is open, and why it is not: it has left, others have taken it for lost, or it
// was made in another process, from which this one was forked. Owned by AgentCore. Usable from
// every thread; nothing here blocks, except that keep_until_left() runs the destructor of the
// object that it replaces.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/inheritance.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/types.h>

namespace weft::call {

class Lifetime {
 public:
  // `self` is the agent's worker; only its address is taken here. The `kept` objects live as long
  // as this one, such as the objects that host the store.
  Lifetime(const WorkerInfo& self, std::vector<std::shared_ptr<const void>> kept)
      : self_(self), kept_(std::move(kept)) {}

  bool closed() const { return closed_; }
  // Returns false if it was closed before.
  bool close() { return !closed_.exchange(true); }
  // Whether the agent was made in another process, from which this one was forked.
  bool is_inherited() const { return made_in_.is_inherited(); }
  // Throws Caller if it was.
  void require_own() const;
  // Throws Caller if the agent has shut down or left; PeerLost if others have taken it for lost.
  void require_open() const;
  // Others have taken this worker for lost. Returns false if that was known.
  bool taken_for_lost(const std::string& why);
  // The error of the calls that are pending when this agent leaves.
  Error why_gone() const;
  // Keeps an object until the agent has left, in place of the object kept before.
  void keep_until_left(std::shared_ptr<const void> kept);

 private:
  const MadeIn made_in_;
  const WorkerInfo& self_;
  std::atomic<bool> closed_{false};
  // Set if the program did not ask the agent to leave; written before taken_for_lost_ is set.
  std::string why_left_;
  std::atomic<bool> taken_for_lost_{false};
  const std::vector<std::shared_ptr<const void>> kept_;
  Mutex mutex_;
  std::shared_ptr<const void> kept_until_left_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
