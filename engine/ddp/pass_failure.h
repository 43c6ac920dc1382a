// SPDX-License-Identifier: Apache-2.0
// Whether the reducer's pass has failed, and why. A pass that has failed cannot be continued: the
// other ranks may have sent and received anything meanwhile.
//
// The reducer's pass owns it, and the reducer's mutex guards it. fail() may block for a second,
// until the other ranks have read why; nothing else blocks.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include <weft/base/error.h>
#include <weft/engine/ddp/gradient_buckets.h>
#include <weft/engine/group/process_group.h>

namespace weft::parallel {

class PassFailure {
 public:
  explicit PassFailure(ProcessGroup group) : group_(std::move(group)) {}

  // A pass begins, in the backward that this thread runs.
  void begin_pass();
  // Another backward begins while one reduces gradients: an exception has ended that one, and the
  // pass has failed. Throws Caller if an AutogradContext still runs it.
  void interrupt();
  void note(std::string why) { why_ = std::move(why); }
  // Notes the error and throws it, or an earlier error of the follower (null: none).
  [[noreturn]] void fail(const std::exception_ptr& caught, BucketFollower* follower);
  bool has_failed() const { return !why_.empty() || interrupted_; }
  // The error for the user; its text has the cause and the remedy.
  Error error() const;

  // True if the pass belongs to a pass of an AutogradContext that has failed.
  bool has_context_failed() const { return context_pass_ && *context_pass_; }
  // Forgets the pass of such a context. If buckets have been launched, the ranks would reduce
  // different ones with each other, so this rank is out of step for good.
  void drop_pass(bool is_any_launched);
  void require_in_step() const;
  // Throws Caller if this thread's backward must not go on with this pass. A pass may leave outputs
  // of the forward for another backward. Outside of contexts that backward goes on with the same
  // gradients. Each pass of a context has its own gradients, so averages would be added to the
  // gradients that the first one has left.
  void require_same_pass() const;

 private:
  ProcessGroup group_;
  std::string why_;           // the error that ended the pass, if known
  bool interrupted_ = false;  // an exception has ended one of its backwards
  bool out_of_step_ = false;  // a pass failed after some of its buckets were launched
  std::shared_ptr<const std::atomic<bool>> context_pass_;  // Pass::failure(), or null
};

}  // namespace weft::parallel
