// Parameters that are frozen or thawed between forwards, the rebuilding of the buckets, and passes
// with zeros.
#include <algorithm>

#include <c10/core/GradMode.h>

#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/core.h>

namespace weft::parallel {

bool Reducer::trains_others() const {
  std::lock_guard lock(mutex_);
  const std::vector<bool> now = parameters_.trained_now();
  if (std::find(now.begin(), now.end(), true) == now.end()) return false;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] != parameters_.is_trained(i) ||
        (parameters_.was_ever_trained(i) && !buckets_.hold(i)))
      return true;
  }
  return false;
}

void Reducer::take_over_trained() {
  std::lock_guard lock(mutex_);
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
  if (!added.empty() && passing_) throw unfinished_pass();
  parameters_.compare(changed.empty() ? added : changed);
  parameters_.set_trained(std::move(trained));
  if (added.empty()) return;
  for (const std::size_t parameter : added) parameters_.set_layout(parameter);
  buckets_.rebuild();
}

// Takes over rank 0's order of arrival, which was sent at the end of the first pass, at the next
// forward.
void Reducer::take_over_order() {
  if (!order_.is_due()) return;
  const auto start = std::chrono::steady_clock::now();
  const auto order = order_.take();
  stats_.wait += std::chrono::steady_clock::now() - start;
  buckets_.build(order);
  stats_.rebuilt = true;
}

void Reducer::mirror_pass() {
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  take_over_order();
  forwards_.count_hidden();  // as the others' backward counts it
  unused_.begin_mirrored_pass(static_graph_.counts_usage());
  buckets_.launch_zeros(forwards_.steps(), passing_);
  if (static_graph_.counts_usage()) unused_.usage().share(groups_.own());
  buckets_.collect();
  unused_.wait_for_usage(group::Core::of(groups_.own()).host_values_device());
  unused_.restore();
  static_graph_.mirror_pass();
  if (order_.is_open()) order_.share(groups_.own(), parameters_.size());
}

}  // namespace weft::parallel
