// SPDX-License-Identifier: Apache-2.0
// The gradients that one backward pass has sent from this worker, as long as they are unanswered,
// and whether all of the pass has ended here.
//
// Owned by the pass. Usable from every thread; nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <set>

#include <weft/base/mutex.h>

namespace weft::autograd {

class SentGradients {
 public:
  // Called before a gradient is sent to that worker. Its sender calls end_one() later.
  void sent(int rank);
  // Called when that worker has answered one.
  void answered(int rank);
  // Called once for each gradient and once for the pass's local part. True if all have ended.
  bool end_one() { return --open_ == 0; }
  // True if a gradient has been sent from here to that worker, so that it takes part.
  bool reached(int rank) const;
  // The workers with an unanswered gradient.
  std::set<int> unanswered() const;

 private:
  std::atomic<std::int64_t> open_{1};  // gradients sent and unanswered, and the local part
  mutable Mutex mutex_;
  std::set<int> reached_ WEFT_GUARDED_BY(mutex_);
  // Ranks with an unanswered gradient, once for each.
  std::multiset<int> unanswered_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
