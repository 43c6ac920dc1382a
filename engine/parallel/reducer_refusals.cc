// What the reducer refuses, and a pass that has failed.
#include <algorithm>

#include <torch/csrc/autograd/variable.h>

#include <weft/engine/autograd/pass.h>
#include <weft/engine/group/core.h>
#include <weft/engine/parallel/reducer.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::parallel {

// A parameter's type and device are those of its accumulator, to which the hook belongs: with others it gets a new one.
void Reducer::require_same_parameters() const {
  std::vector<std::size_t> changed;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (torch::autograd::impl::try_get_grad_accumulator(parameters_[i].tensor) != accumulators_[i]) changed.push_back(i);
  }
  if (changed.empty()) return;
  throw Error(Blame::Caller, "the type or the device of " + names_of(changed) +
                                 " is not that with which DistributedDataParallel was made, and gradients would not be "
                                 "averaged; call module->to(…) first, then make the DistributedDataParallel");
}

// A pass over several workers that has failed never came to finish(). What the user's retained graph brings next is another
// pass; where buckets have gone already, the ranks would reduce different ones with each other.
void Reducer::drop_failed_pass() {
  if (!passing_ || !pass_failed_ || !*pass_failed_) return;
  pass_failed_ = nullptr;
  failure_.clear();
  passing_ = false;
  finish_queued_ = false;
  out_of_step_ = next_bucket_ > 0;
  for (Bucket& bucket : buckets_) {
    bucket.work = {};
    bucket.reduced = {};
    bucket.averaged.reset();
    bucket.sparse_sum = {};
    bucket.sparse_gradient = at::Tensor();
    bucket.streams.clear();
  }
  usage_.take_work();
  std::fill(kept_.begin(), kept_.end(), at::Tensor());
  usage_.forget();
  static_graph_.drop_pass();
}

// From here on a backward is another wrapper's, of the same model. (A distributed pass learns by pass_failed_.)
void Reducer::note_failure(std::string why) {
  failure_ = std::move(why);
  if (autograd::Pass::current() == nullptr) expecting_ = false;
}

// Nobody knows what the other ranks have sent and received meanwhile.
Error Reducer::failed_pass() const {
  return {Blame::Caller, "the last backward failed on rank " + std::to_string(group().rank()) +
                             (failure_.empty() ? ": an exception ended it before its gradients were averaged"
                                               : ", and its gradients are not averaged: " + failure_) +
                             "; make a new DistributedDataParallel in place of this one on all ranks, with a new group "
                             "unless the backward failed alike on all of them"};
}

void Reducer::require_in_step() const {
  if (!out_of_step_) return;
  throw Error(Blame::Caller, "a distributed backward has failed on rank " + std::to_string(group().rank()) +
                                 " when some of its gradients had been sent to the other ranks, which are not in step with "
                                 "this one any more; make a new group and a new DistributedDataParallel on all of them");
}

// A pass may leave outputs of the forward for another one. Outside of contexts that one goes on with the same gradients;
// each pass of a context has its own, and averages would be added to what the first one has left.
void Reducer::require_same_pass() const {
  const auto* const pass = autograd::Pass::current();
  if (pass_failed_ == (pass ? pass->failure() : nullptr)) return;
  throw Error(Blame::Caller,
              "another backward has brought some of this forward's gradients on rank " + std::to_string(group().rank()) +
                  ", and an AutogradContext keeps those of each backward apart: they cannot be averaged together. Give all "
                  "losses of a forward to one context.backward({a, b})");
}

// A CUDA graph repeats what streams did; these steps do something on the host as well.
void Reducer::refuse_capture() const {
  const bool builds = rebuilds() && !stats_.rebuilt;
  if ((!builds && !counts_usage() && follower_ == nullptr) || !group().device().is_cuda()) return;
  group::Core::of(group()).options.job->devices->refuse_capture(
      group().device(), "this step of DistributedDataParallel",
      follower_ != nullptr ? "an optimizer steps in its backward, on streams of its own; leave out overlap_with"
      : builds             ? "the buckets are built anew behind the first one; run two steps before the capture"
                           : "which parameters are used is counted on the host; capture without find_unused_parameters");
}

void Reducer::check_static_graph(std::size_t parameter) {
  if (static_graph_.take(parameter)) return;
  throw Error(Blame::Caller, "static_graph: this pass brings a gradient for " + names_of({parameter}) +
                                 (static_graph_.uses(parameter) ? " more often than the first pass did"
                                                                : ", which the first pass did not use") +
                                 "; the graph changed, switch static_graph off");
}

// Once this rank has counted. Where it only mirrored the pass in which the others counted, they know nothing of what it
// alone uses: for good they leave that without a gradient, and it would be stepped on this rank only.
void Reducer::require_used_by_others() {
  if (!static_graph_.is_shared()) return;
  std::vector<std::size_t> used_here;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (static_graph_.uses(i) && usage_.is_here(i) && !usage_.is_anywhere(i)) used_here.push_back(i);
  }
  if (used_here.empty()) return;
  const Error error(Blame::Caller, "static_graph: this pass brings a gradient for " + names_of(used_here) +
                                       ", which the first pass of the others, mirrored here by join, did not use; let all "
                                       "ranks take part in the first backward, or switch static_graph off");
  note_failure(error.text());
  throw error;
}

std::vector<std::size_t> Reducer::missing_parameters() const {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool came = static_graph_.is_counted() ? !static_graph_.misses(i) : ready_[i];
    if (!came) missing.push_back(i);
  }
  return missing;
}

std::string Reducer::names_of(const std::vector<std::size_t>& parameters) const {
  constexpr std::size_t kShown = 20;
  std::string text = parameters.size() == 1 ? "parameter " : "parameters ";
  for (std::size_t i = 0; i < std::min(parameters.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(parameters[i]) + " (" + parameters_[parameters[i]].name + ")";
  }
  if (parameters.size() > kShown) text += " and " + std::to_string(parameters.size() - kShown) + " more";
  return text + " on rank " + std::to_string(group().rank());
}

}  // namespace weft::parallel
