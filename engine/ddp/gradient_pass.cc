// SPDX-License-Identifier: Apache-2.0
#include <chrono>

#include <weft/base/log.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/gradient_pass.h>
#include <weft/engine/group/access.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

namespace traced {
namespace {
constinit trace::Name gradients{trace::Layer::Engine, "gradients"};  // the wait of the backward
}  // namespace
}  // namespace traced

namespace {

// A CUDA graph repeats only the work of streams, and these steps also work on the host.
void refuse_capture(const ProcessGroup& group, bool has_follower, bool rebuilds, bool counts) {
  if ((!rebuilds && !counts && !has_follower) || !group.device().is_cuda()) return;
  group::refuse_capture(
      group, group.device(), "this step of DistributedDataParallel",
      has_follower
          ? "an optimizer steps in its backward, on streams of its own; leave out overlap_with"
      : rebuilds ? "the buckets are rebuilt after the first step; run two steps before the capture"
                 : "which parameters are used is counted on the host; capture without "
                   "find_unused_parameters");
}

}  // namespace

GradientPass::GradientPass(TrainedParameters& parameters, DeviceGroups& groups,
                           GradientBuckets& buckets, Forwards& forwards, const DdpOptions& options)
    : parameters_(parameters),
      groups_(groups),
      buckets_(buckets),
      forwards_(forwards),
      unused_(parameters, buckets),
      static_graph_(options, parameters),
      order_(options.static_graph || !options.find_unused_parameters),
      failure_(groups.own()) {
  note_buckets(/*rebuilt=*/false);
}

DdpStats GradientPass::stats() const {
  MutexLock lock(stats_mutex_);
  return stats_;
}

void GradientPass::note_buckets(bool rebuilt, std::chrono::nanoseconds waited) {
  MutexLock lock(stats_mutex_);
  stats_.bucket_bytes = buckets_.bytes();
  stats_.rebuilt |= rebuilt;
  stats_.wait += waited;
}

void GradientPass::require_none(const std::string& call) const {
  if (has_failed()) throw failure_.error().within(call);
  if (!open_) return;
  throw Error(Blame::Caller,
              call +
                  ": a backward is running, or an exception has ended it before its gradients were "
                  "averaged; call it before a backward, or make a new DistributedDataParallel");
}

void GradientPass::prepare(bool is_reducing) {
  failure_.require_in_step();
  refuse_capture(groups_.own(), follower_ != nullptr, order_.is_ahead(),
                 static_graph_.counts_usage());
  // A broken group may be the reason why the pass did not end.
  if (open_) group::throw_if_refused(groups_.own());
  if (open_ && (is_reducing || has_failed())) throw failure_.error();
  if (open_ && static_graph_.is_counted()) {
    throw Error(Blame::Caller,
                "static_graph: the last backward brought fewer gradients than the first one, or "
                "none, for " +
                    parameters_.names_of(missing()) +
                    "; the graph changed, switch static_graph off");
  }
  if (open_) throw unfinished();
  // If the ranks count usage, they average a frozen parameter's gradient like one of a parameter
  // that only some of them use.
  if (!static_graph_.counts_usage()) unused_.require_no_frozen_rest();
  take_over_order();
}

void GradientPass::compare_trained() {
  std::vector<bool> trained = parameters_.trained_now();
  std::vector<std::size_t> changed;
  std::vector<std::size_t> added;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (trained[i] != parameters_.is_trained(i)) changed.push_back(i);
    if (parameters_.was_ever_trained(i) && !buckets_.hold(i)) added.push_back(i);
  }
  if (!changed.empty() && static_graph_) {
    throw Error(Blame::Caller,
                "static_graph: requires_grad was changed for " + parameters_.names_of(changed) +
                    ", and the graph with it; switch static_graph off, or make a new "
                    "DistributedDataParallel");
  }
  if (!added.empty() && follower_ != nullptr) {
    throw Error(Blame::Caller,
                "requires_grad was switched on for " + parameters_.names_of(added) +
                    ", and an optimizer steps in the backward of this DistributedDataParallel, "
                    "which would leave them out; make both again");
  }
  if (!added.empty() && open_) throw unfinished();
  parameters_.compare(changed.empty() ? added : changed);
  parameters_.set_trained(std::move(trained));
  if (added.empty()) return;
  for (const std::size_t parameter : added) parameters_.set_layout(parameter);
  buckets_.rebuild();
  note_buckets(/*rebuilt=*/false);
}

bool GradientPass::drop_failed() {
  if (!open_ || !failure_.has_context_failed()) return false;
  open_ = false;
  failure_.drop_pass(buckets_.is_any_launched());
  buckets_.drop_pass();
  unused_.drop_pass();
  static_graph_.drop_pass();
  return true;
}

void GradientPass::enter_backward(bool is_reducing) {
  if (open_ && is_reducing) failure_.interrupt();
  goes_on_ = open_;
}

void GradientPass::begin() {
  if (has_failed()) throw failure_.error();
  if (open_) return failure_.require_same_pass();
  failure_.require_in_step();
  if (follower_ != nullptr && autograd::Pass::current() != nullptr) {
    throw Error(Blame::Caller,
                "an AutogradContext keeps its gradients for itself, and an optimizer that steps in "
                "the backward of this "
                "DistributedDataParallel would not see them; call loss.backward() without a "
                "context, or leave out "
                "overlap_with");
  }
  open_ = true;
  goes_on_ = told_unfinished_ = false;
  taken_ = 0;
  failure_.begin_pass();
  buckets_.begin_pass();
  if (static_graph_.is_counted()) {
    static_graph_.begin_pass();
    unused_.begin_pass(static_graph_.unused());
  } else {
    unused_.begin_pass(static_graph_.finds_unused() ? forwards_.unused(parameters_.size())
                                                    : std::vector<std::size_t>{});
  }
}

void GradientPass::fill_unused() {
  if (!unused_.are_to_be_filled()) return;
  for (const std::size_t parameter : unused_.all()) {
    if (buckets_.is_filled(parameter)) continue;
    unused_.keep(parameter);
    fill(parameter);
  }
}

void GradientPass::take(std::size_t parameter) {
  if (!buckets_.hold(parameter)) {
    throw Error(
        Blame::Caller,
        "the backward brings a gradient for " + parameters_.names_of({parameter}) +
            ", which required none at the last forward that synchronised; call requires_grad_() "
            "before that forward");
  }
  if (goes_on_ && buckets_.is_filled(parameter) && parameters_.is_trained(parameter) &&
      !static_graph_)
    throw unfinished();
  if (++taken_ == 1) unused_.add_frozen();
  if (order_.is_open()) order_.note(parameter);
  if (static_graph_.counts()) return static_graph_.count(parameter);
  if (static_graph_) {
    static_graph_.take(parameter);
    if (static_graph_.misses(parameter)) return;
  }
  fill_unused();
  // libtorch calls this for a parameter that has been frozen since its forward too, and adds
  // nothing to its gradient.
  const bool is_frozen = !parameters_[parameter].tensor.requires_grad();
  if (is_frozen && buckets_.is_filled(parameter) && !parameters_.is_trained(parameter)) return;
  const bool is_defined = gradient_of(parameters_[parameter].tensor).defined();
  if (is_frozen || (!is_defined && static_graph_.finds_unused())) {
    unused_.keep(parameter);
    unused_.add(parameter);
  }
  fill(parameter);
}

void GradientPass::fill(std::size_t parameter) {
  if (buckets_.fill(parameter)) launch_full();
}

void GradientPass::launch_full() {
  try {
    while (buckets_.is_next_full()) {
      buckets_.launch_next(forwards_.steps(), open_);
      // With counted usage, the unused parameters are known only at the end of the pass.
      if (follower_ == nullptr || static_graph_.counts_usage()) continue;
      buckets_.follow(*follower_,
                      [&](std::size_t parameter) { return unused_.is_used_anywhere(parameter); });
    }
  } catch (...) {
    failure_.fail(std::current_exception(), follower_);
  }
  if (buckets_.are_all_launched() && static_graph_.counts_usage()) usage().share(groups_.own());
}

void GradientPass::finish() {
  if (static_graph_.counts()) {
    fill_counted();
  } else if (!buckets_.are_all_launched()) {
    if (taken_ > 0 && missing().empty()) {
      unused_.add_thawed();
      fill_unused();
    }
    if (!buckets_.are_all_launched() && !static_graph_.finds_unused()) {
      // Another backward of this forward's outputs brings the rest. If no gradient has come (the
      // parameters were frozen meanwhile), none need follow.
      const bool any_came = buckets_.is_any_launched() || taken_ > 0;
      if (!any_came && !static_graph_) open_ = false;
      return;
    }
    unused_.add_missing();
    fill_unused();
  }
  const trace::Range range(traced::gradients, {.rank = groups_.own().rank()});
  const auto start = std::chrono::steady_clock::now();
  try {
    buckets_.collect();
    unused_.wait_for_usage(group::host_values_device(groups_.own()));
  } catch (...) {
    failure_.fail(std::current_exception(), follower_);
  }
  const auto waited = std::chrono::steady_clock::now() - start;
  unused_.restore();
  order_.share(groups_.own(), parameters_.size());
  static_graph_.end_pass();
  forwards_.end_pass();
  open_ = false;
  MutexLock lock(stats_mutex_);
  stats_.last_wait = waited;
  stats_.wait += waited;
  ++stats_.passes;
}

// Does the work of the first pass over a static graph, which was put off until here, where all
// gradients of this graph are known.
void GradientPass::fill_counted() {
  if (const auto error = static_graph_.unknown_to_others(usage())) {
    failure_.note(error->text());
    throw Error(*error);
  }
  unused_.begin_pass(static_graph_.unused());
  fill_unused();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (buckets_.hold(i) && !buckets_.is_filled(i)) fill(i);
  }
}

void GradientPass::mirror() {
  take_over_order();
  warn_of_rest();
  forwards_.count_hidden();  // as the others' backward counts it
  unused_.begin_mirrored_pass(static_graph_.counts_usage());
  buckets_.launch_zeros(forwards_.steps(), open_);
  if (static_graph_.counts_usage()) usage().share(groups_.own());
  buckets_.collect();
  unused_.wait_for_usage(group::host_values_device(groups_.own()));
  unused_.restore();
  static_graph_.mirror_pass();
  order_.share(groups_.own(), parameters_.size());
}

// The averages of the others take the place of gradients that this rank had when it ran out.
void GradientPass::warn_of_rest() {
  std::vector<std::size_t> rests;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (buckets_.hold(i) && usage().is_here(i)) rests.push_back(i);
  }
  if (rests.empty()) return;
  log::warn(
      "join: this rank has run out of inputs with gradients of no_sync() that no backward "
      "has averaged, and drops those of " +
      parameters_.names_of(rests) + "; let the last backward of each rank synchronise");
}

// Takes over rank 0's order of arrival, which was sent at the end of the first pass, at the next
// forward.
void GradientPass::take_over_order() {
  if (!order_.is_due()) return;
  const auto start = std::chrono::steady_clock::now();
  const auto order = order_.take();
  const auto waited = std::chrono::steady_clock::now() - start;
  buckets_.build(order);
  note_buckets(/*rebuilt=*/true, waited);
}

std::vector<std::size_t> GradientPass::missing() const {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool came = static_graph_.is_counted() ? !static_graph_.misses(i) : buckets_.is_filled(i);
    if (!came && buckets_.hold(i) && parameters_.is_trained(i)) missing.push_back(i);
  }
  return missing;
}

Error GradientPass::unfinished() {
  told_unfinished_ = true;
  return {Blame::Caller, "the last backward did not reduce all gradients: it brought none for " +
                             parameters_.names_of(missing()) +
                             ". If the outputs need not depend on every parameter, set "
                             "DdpOptions::find_unused_parameters; all outputs of "
                             "the forward must take part in the loss"};
}

}  // namespace weft::parallel
