// SPDX-License-Identifier: Apache-2.0
// The handles of this worker to values of other workers, while they live.
//
// Owned by the agent's references. Usable from every thread; nothing here blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/rref/handle.h>

namespace weft::rref {

class WEFT_API Users {
 public:
  // Called by a handle when it has been made, and when it ends.
  void enter(const Handle& user);
  void forget(const Handle& user);
  // True if a living handle is that fork.
  bool has(ForkId fork) const;
  // Describes each living handle and its origin.
  std::vector<std::string> held() const;
  // Counts handles that their owners do not know yet.
  void count_pending(int change) { pending_ += change; }
  std::size_t pending() const { return static_cast<std::size_t>(std::max(0, pending_.load())); }

 private:
  std::atomic<int> pending_{0};
  mutable Mutex mutex_;
  std::unordered_map<ForkId, const Handle*> users_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::rref
