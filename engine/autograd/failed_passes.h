// SPDX-License-Identifier: Apache-2.0
// The failed passes of one autograd context, as long as a worker may not know that they have
// failed. This worker's messages in the context name them (PassName::failed).
//
// Owned by the context. Usable from every thread; nothing here blocks. The mutex is held while the
// recording is asked for the workers, so that a worker that is removed from there first and from
// here afterwards stays in neither.
#pragma once

#include <map>
#include <set>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/autograd/ids.h>

namespace weft::autograd {

class Recording;

class FailedPasses {
 public:
  // `self`: the rank of this worker, which is never told.
  FailedPasses(const Recording& recording, int self) : recording_(recording), self_(self) {}
  // Called when a pass has failed: all workers that take part are to be told.
  void add(PassId pass);
  // Notes that the worker knows that the pass has failed, or is gone.
  void told(PassId pass, int rank);
  // Notes that the worker `lost` is gone, and that `others` are to be told in its place.
  void replace(PassId pass, int lost, const std::set<int>& others);
  // Called when the worker has ended the context, so it need not be told of any pass.
  void remove_worker(int rank);
  std::vector<PassId> untold() const;

 private:
  const Recording& recording_;
  const int self_;
  mutable Mutex mutex_;
  // At most kMostNamed passes, and the workers that may not know of them.
  std::map<PassId, std::set<int>> untold_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
