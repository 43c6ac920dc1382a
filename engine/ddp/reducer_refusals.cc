// The reducer's refusals, and its handling of failed passes.
#include <algorithm>

#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::parallel {

// Hooks the accumulators that parameters have got meanwhile. Throws if a parameter's type, device
// or shape is no longer that of its place in the bucket.
void Reducer::follow_parameters() {
  parameters_.note_trained();
  std::vector<std::size_t> changed;
  std::vector<std::size_t> moved;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (buckets_.hold(i) && !parameters_.keeps_layout(i)) {
      changed.push_back(i);
    } else if (tensor.requires_grad() && !hooks_.is_attached(i, tensor)) {
      moved.push_back(i);
    }
  }
  if (!changed.empty()) {
    throw Error(Blame::Caller,
                "the type, the device or the shape of " + parameters_.names_of(changed) +
                    " has changed since DistributedDataParallel was made, and gradients would not "
                    "be averaged; call module->to(…) first, then make the DistributedDataParallel");
  }
  if (moved.empty()) return;
  hooks_.drop_former();
  for (const std::size_t parameter : moved) attach(parameter);
}

// Resets the state of a failed distributed pass, which never reached finish(). The next backward of
// the user's retained graph is another pass. If buckets have been launched already, the ranks would
// reduce different ones with each other, so this rank is out of step.
void Reducer::drop_failed_pass() {
  if (!passing_ || !pass_failed_ || !*pass_failed_) return;
  pass_failed_ = nullptr;
  failure_.clear();
  passing_ = false;
  interrupted_ = false;
  backward_.end();
  out_of_step_ = buckets_.is_any_launched();
  buckets_.drop_pass();
  unused_.drop_pass();
  static_graph_.drop_pass();
}

void Reducer::note_failure(std::string why) { failure_ = std::move(why); }

void Reducer::fail_pass(const std::exception_ptr& caught) {
  std::exception_ptr why = caught;
  try {
    std::rethrow_exception(caught);
  } catch (const Error& error) {
    why = std::make_exception_ptr(explained_by_changes(groups_.own(), error));
  } catch (...) {  // a user's hook may throw anything
  }
  note_failure(group::first_line_of(why).text());
  if (follower_ != nullptr) follower_->fail(why);
  std::rethrow_exception(why);
}

// True if later backwards belong to another wrapper of the model. (Distributed passes use
// pass_failed_ instead.)
bool Reducer::has_failed() const { return passing_ && (!failure_.empty() || interrupted_); }

Error Reducer::unfinished_pass() {
  told_unfinished_ = true;
  return {Blame::Caller, "the last backward did not reduce all gradients: it brought none for " +
                             parameters_.names_of(missing_parameters()) +
                             ". If the outputs need not depend on every parameter, set "
                             "DdpOptions::find_unused_parameters; all outputs of "
                             "the forward must take part in the loss"};
}

// The other ranks may have sent and received anything meanwhile, so the pass cannot be continued.
Error Reducer::failed_pass() const {
  return {Blame::Caller,
          "the last backward failed on rank " + std::to_string(group().rank()) +
              (failure_.empty() ? ": an exception ended it before its gradients were averaged"
                                : ", and its gradients are not averaged: " + failure_) +
              "; make a new DistributedDataParallel in place of this one on all ranks, with a new "
              "group "
              "unless the backward failed alike on all of them"};
}

void Reducer::require_in_step() const {
  if (!out_of_step_) return;
  throw Error(
      Blame::Caller,
      "a distributed backward has failed on rank " + std::to_string(group().rank()) +
          " when some of its gradients had been sent to the other ranks, which are not in step "
          "with "
          "this one any more; make a new group and a new DistributedDataParallel on all of them");
}

// A pass may leave outputs of the forward for another backward. Outside of contexts that backward
// goes on with the same gradients. Each pass of a context has its own gradients, so averages would
// be added to the gradients that the first one has left.
void Reducer::require_same_pass() const {
  const auto* const pass = autograd::Pass::current();
  if (pass_failed_ == (pass ? pass->failure() : nullptr)) return;
  throw Error(Blame::Caller,
              "another backward has brought some of this forward's gradients on rank " +
                  std::to_string(group().rank()) +
                  ", and an AutogradContext keeps those of each backward apart: they cannot be "
                  "averaged together. Give all "
                  "losses of a forward to one context.backward({a, b})");
}

// A CUDA graph repeats only the work of streams, and these steps also work on the host.
void Reducer::refuse_capture() const {
  const bool builds = order_.is_ahead();
  if ((!builds && !static_graph_.counts_usage() && follower_ == nullptr) ||
      !group().device().is_cuda())
    return;
  group::Core::of(group()).options.job->devices->refuse_capture(
      group().device(), "this step of DistributedDataParallel",
      follower_ != nullptr
          ? "an optimizer steps in its backward, on streams of its own; leave out overlap_with"
      : builds ? "the buckets are rebuilt after the first step; run two steps before the capture"
               : "which parameters are used is counted on the host; capture without "
                 "find_unused_parameters");
}

std::vector<at::Tensor> Reducer::averaged_parameters() const {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (buckets_.hold(i)) tensors.push_back(parameters_[i].tensor);
  }
  return tensors;
}

std::vector<std::size_t> Reducer::missing_parameters() const {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool came = static_graph_.is_counted() ? !static_graph_.misses(i) : buckets_.is_filled(i);
    if (!came && buckets_.hold(i) && parameters_.is_trained(i)) missing.push_back(i);
  }
  return missing;
}

}  // namespace weft::parallel
