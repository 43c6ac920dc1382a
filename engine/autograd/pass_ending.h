// SPDX-License-Identifier: Apache-2.0
// The end of one backward pass on this worker. A pass ends once: it succeeds, or it fails, perhaps
// because its deadline has passed.
//
// Owned by the pass. Usable from every thread; nothing here blocks.
#pragma once

#include <atomic>
#include <memory>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/task.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/future/future.h>

namespace weft::autograd {

class PassEnding {
 public:
  explicit PassEnding(const std::shared_ptr<weft::detail::Executor>& executor)
      : promise_(executor), told_(Future<void>::ready()) {}

  // Runs `expire` on the loop at the deadline, unless the pass has ended.
  void watch(EventLoop& loop, Deadline deadline, Task expire);
  // True for the one caller that ends the pass; that one calls set() afterwards.
  bool succeed() { return end(); }
  bool fail();
  bool has_ended() const { return ended_; }
  // Completes outcome().
  void set(const Outcome& outcome) { promise_.set(outcome); }
  Future<Outcome> outcome() const { return promise_.future(); }
  // True once the pass has failed here; may outlive it.
  std::shared_ptr<const std::atomic<bool>> failure() const { return failed_; }

  // Called when this worker tells the others that the pass has failed; called before set().
  void tell(Future<void> told);
  // For a failed pass: done when the others have been told, or have not answered within the limit
  // of Pass::fail(). A worker that has not answered hears of it later (PassName::failed).
  Future<void> told() const;

 private:
  bool end();

  const Promise<Outcome> promise_;
  std::atomic<bool> ended_{false};
  const std::shared_ptr<std::atomic<bool>> failed_ = std::make_shared<std::atomic<bool>>(false);
  mutable Mutex mutex_;
  EventLoop::Registration timer_ WEFT_GUARDED_BY(mutex_);
  Future<void> told_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
