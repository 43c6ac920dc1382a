// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <weft/engine/ddp/reducer_state.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>

namespace weft::parallel {

Usage::Usage(std::size_t parameters)
    : here_(at::zeros({static_cast<std::int64_t>(parameters)}, at::TensorOptions(at::kInt))) {}

void Usage::note(std::size_t parameter) { here_[static_cast<std::int64_t>(parameter)] = 1; }

bool Usage::is_here(std::size_t parameter) const {
  return here_[static_cast<std::int64_t>(parameter)].item<int>() > 0;
}

void Usage::share(ProcessGroup& group) {
  const c10::Device device = group::host_values_device(group);
  sum_ = here_.to(device, here_.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  const group::CalledBy by("DistributedDataParallel's used parameters");
  work_ = group.all_reduce(sum_);
}

bool Usage::is_anywhere(std::size_t parameter) {
  // Copies to the host once only: with a static graph every later pass asks again, perhaps while a
  // CUDA graph is captured.
  sum_ = sum_.to(at::kCPU);
  return sum_[static_cast<std::int64_t>(parameter)].item<int>() > 0;
}

std::vector<std::size_t> StaticGraph::unused() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    if (!uses(i)) result.push_back(i);
  }
  return result;
}

void StaticGraph::take(std::size_t parameter) {
  if (uses(parameter) && --remaining_[parameter] >= 0) return;
  throw Error(Blame::Caller, "static_graph: this pass brings a gradient for " +
                                 parameters_.names_of({parameter}) +
                                 (uses(parameter) ? " more often than the first pass did"
                                                  : ", which the first pass did not use") +
                                 "; the graph changed, switch static_graph off");
}

std::optional<Error> StaticGraph::unknown_to_others(Usage& usage) const {
  if (!shared_) return std::nullopt;
  std::vector<std::size_t> used_here;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (uses(i) && usage.is_here(i) && !usage.is_anywhere(i)) used_here.push_back(i);
  }
  if (used_here.empty()) return std::nullopt;
  return Error(
      Blame::Caller,
      "static_graph: this pass brings a gradient for " + parameters_.names_of(used_here) +
          ", which the first pass of the others, mirrored here by join, did not use; let all "
          "ranks take part in the first backward, or switch static_graph off");
}

void StaticGraph::drop_pass() {
  if (!counted_) std::fill(counts_.begin(), counts_.end(), 0);
}

void ArrivalOrder::share(ProcessGroup& group, std::size_t parameters) {
  if (!is_open()) return;
  std::vector<std::int64_t> order;
  std::vector<bool> named(parameters);
  const auto add = [&](std::size_t parameter) {
    if (!named[parameter]) order.push_back(static_cast<std::int64_t>(parameter));
    named[parameter] = true;
  };
  for (const std::size_t parameter : arrived_) add(parameter);
  for (std::size_t i = parameters; i-- > 0;) add(i);
  arrived_.clear();
  order_ = at::empty({static_cast<std::int64_t>(order.size())}, at::TensorOptions(at::kLong));
  std::copy(order.begin(), order.end(), order_.data_ptr<std::int64_t>());
  order_ = order_.to(group::host_values_device(group));
  const group::CalledBy by("DistributedDataParallel's new buckets");
  work_ = group.broadcast(order_, 0);
  shared_ = true;
}

std::vector<std::size_t> ArrivalOrder::take() {
  work_.wait();
  taken_ = true;
  const at::Tensor order = std::exchange(order_, {}).to(at::kCPU);
  const auto* data = order.data_ptr<std::int64_t>();
  return {data, data + order.numel()};
}

}  // namespace weft::parallel
