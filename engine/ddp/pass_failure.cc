// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/ddp/pass_failure.h>
#include <weft/engine/group/collective_error.h>

namespace weft::parallel {

void PassFailure::begin_pass() {
  interrupted_ = false;
  const auto* const pass = autograd::Pass::current();
  context_pass_ = pass ? pass->ending().failure() : nullptr;
}

void PassFailure::interrupt() {
  if (why_.empty() && context_pass_) require_same_pass();
  interrupted_ = true;
}

void PassFailure::fail(const std::exception_ptr& caught, BucketFollower* follower) {
  std::exception_ptr why = caught;
  try {
    std::rethrow_exception(caught);
  } catch (const Error& error) {
    why = std::make_exception_ptr(explained_by_changes(group_, error));
  } catch (...) {  // a user's hook may throw anything
  }
  note(group::first_line_of(why).text());
  if (follower != nullptr) follower->fail(why);
  std::rethrow_exception(why);
}

Error PassFailure::error() const {
  return {Blame::Caller,
          "the last backward failed on rank " + std::to_string(group_.rank()) +
              (why_.empty() ? ": an exception ended it before its gradients were averaged"
                            : ", and its gradients are not averaged: " + why_) +
              "; make a new DistributedDataParallel in place of this one on all ranks, with a new "
              "group "
              "unless the backward failed alike on all of them"};
}

void PassFailure::drop_pass(bool is_any_launched) {
  context_pass_ = nullptr;
  why_.clear();
  interrupted_ = false;
  out_of_step_ = is_any_launched;
}

void PassFailure::require_in_step() const {
  if (!out_of_step_) return;
  throw Error(
      Blame::Caller,
      "a distributed backward has failed on rank " + std::to_string(group_.rank()) +
          " when some of its gradients had been sent to the other ranks, which are not in step "
          "with "
          "this one any more; make a new group and a new DistributedDataParallel on all of them");
}

void PassFailure::require_same_pass() const {
  const auto* const pass = autograd::Pass::current();
  if (context_pass_ == (pass ? pass->ending().failure() : nullptr)) return;
  throw Error(Blame::Caller,
              "another backward has brought some of this forward's gradients on rank " +
                  std::to_string(group_.rank()) +
                  ", and an AutogradContext keeps those of each backward apart: they cannot be "
                  "averaged together. Give all "
                  "losses of a forward to one context.backward({a, b})");
}

}  // namespace weft::parallel
