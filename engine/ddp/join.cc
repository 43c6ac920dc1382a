// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <weft/engine/ddp/join.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/collective_error.h>

namespace weft {

namespace parallel::detail {

namespace {

// Checks that all ranks exchange equally much in every step and throw in the same cases: tensors of
// different sizes would end a process with Gloo, and a rank that does not throw would wait for
// those that do.
void compare_calls(ProcessGroup& group, std::size_t joinables, const JoinOptions& options) {
  if (group.size() == 1) return;
  const std::vector<int> mine{static_cast<int>(joinables),
                              options.divide_by_initial_world_size ? 1 : 0,
                              options.throw_on_early_termination ? 1 : 0};
  const auto count = static_cast<std::int64_t>(mine.size());
  at::Tensor most = at::empty({2 * count}, at::TensorOptions(at::kInt));
  int* data = most.mutable_data_ptr<int>();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    data[i] = mine[i];
    data[mine.size() + i] = -mine[i];
  }
  most = most.to(group::host_values_device(group));
  const group::CalledBy by("join");
  group.all_reduce(most, ReduceOp::Max).wait();
  most = most.to(at::kCPU);
  const char* const what[] = {"different numbers of objects",
                              "different values of divide_by_initial_world_size",
                              "different values of throw_on_early_termination"};
  for (std::int64_t i = 0; i < count; ++i) {
    const int* both = static_cast<const int*>(most.const_data_ptr()) + i;
    if (both[0] == -both[count]) continue;
    group::throw_together(group, Error(Blame::Caller, std::string("join: the ranks give ") +
                                                          what[i] + "; give the same on all"));
  }
}

}  // namespace

JoinScope::JoinScope(std::vector<Joinable*> joinables, JoinOptions options)
    : outer_(innermost()),
      joinables_(std::move(joinables)),
      options_(options),
      group_(joinables_.front()->join_group()),
      active_(group_.size()) {
  for (auto place = joinables_.begin(); place != joinables_.end(); ++place) {
    Joinable& joinable = **place;
    if (joinable.join_scope_ != nullptr)
      throw Error(Blame::Caller, "join: this object is inside another join already");
    if (std::find(joinables_.begin(), place, &joinable) != place) {
      throw Error(
          Blame::Caller,
          "join: one object is given twice; name each once, where it first communicates in a step");
    }
    // A rank runs out for all joinables at once, and the exchange names active ranks by their
    // number in the group.
    if (joinable.join_group().ranks() != group_.ranks()) {
      throw Error(Blame::Caller,
                  "join: the objects' groups have different members; make them with groups of the "
                  "same ranks in the same "
                  "order");
    }
    if (joinable.joins_alone() && joinables_.size() > 1) {
      throw Error(Blame::Caller,
                  "join: a sharded model cannot be joined together with other objects, whose "
                  "communication may come between that of its units; join it alone, with its "
                  "optimizers: weft::join(sharded, optimizer, steps)");
    }
    joinable.check_join();
  }
  compare_calls(group_, joinables_.size(), options_);
  for (Joinable* joinable : joinables_) joinable->join_scope_ = this;
  innermost() = this;
}

JoinScope*& JoinScope::innermost() {
  static thread_local JoinScope* scope = nullptr;
  return scope;
}

bool JoinScope::is_without_some_ranks() {
  const JoinScope* const scope = innermost();
  return scope != nullptr && scope->active_ < scope->group_.size();
}

JoinScope::~JoinScope() {
  innermost() = outer_;
  for (Joinable* joinable : joinables_) joinable->join_scope_ = nullptr;
}

// Exchanges one number for each rank (1: active), how many of the active ranks synchronise, and how
// many of them train each joinable: a rank that has run out may have switched its own module to
// evaluation.
JoinScope::Round JoinScope::exchange(bool active, bool synchronizes) {
  const auto ranks = static_cast<std::int64_t>(group_.size());
  const auto device = group::host_values_device(group_);
  const auto joinables = static_cast<std::int64_t>(joinables_.size());
  at::Tensor counts = at::zeros({ranks + 1 + joinables}, at::TensorOptions(at::kInt));
  if (active) {
    counts[group_.rank()] = 1;
    counts[ranks] = synchronizes ? 1 : 0;
    for (std::int64_t i = 0; i < joinables; ++i) {
      counts[ranks + 1 + i] = joinables_[static_cast<std::size_t>(i)]->trains() ? 1 : 0;
    }
  }
  counts = counts.to(device);
  const group::CalledBy by("join");
  group_.all_reduce(counts).wait();
  counts = counts.to(at::kCPU);
  const int* data = counts.data_ptr<int>();
  Round round;
  round.active_ranks.resize(static_cast<std::size_t>(ranks));
  for (int rank = group_.size(); rank-- > 0;) {
    if (data[rank] == 0) continue;
    ++round.active;
    round.first = rank;
    round.active_ranks[static_cast<std::size_t>(rank)] = true;
  }
  round.synchronizes = data[ranks] > 0;
  for (std::int64_t i = 0; i < joinables; ++i) round.trains.push_back(data[ranks + 1 + i] > 0);
  return round;
}

void JoinScope::announce_step(const Joinable& joinable, bool synchronizes) {
  if (&joinable != joinables_.front()) return;
  for (Joinable* one : joinables_) one->end_step();
  const Round round = exchange(true, synchronizes);
  if (options_.throw_on_early_termination && round.active < group_.size()) {
    ends_on_all_ = true;
    throw Error(Blame::Cancelled, "join: " + std::to_string(group_.size() - round.active) + " of " +
                                      std::to_string(group_.size()) +
                                      " ranks ran out of inputs (throw_on_early_termination)");
  }
  active_ = round.active;
  first_active_ = round.first;
  for (Joinable* one : joinables_) one->begin_step(round.active_ranks);
}

int JoinScope::divisor() const {
  return options_.divide_by_initial_world_size ? group_.size() : active_;
}

void JoinScope::run_out() {
  for (Joinable* joinable : joinables_) joinable->end_step();
  int last_rank = first_active_;
  for (;;) {
    const Round round = exchange(false, false);
    if (options_.throw_on_early_termination && round.active > 0) {
      ends_on_all_ = true;
      throw Error(Blame::Cancelled,
                  "join: rank " + std::to_string(group_.rank()) +
                      " ran out of inputs while others had more (throw_on_early_termination)");
    }
    if (round.active == 0) break;
    last_rank = round.first;
    active_ = round.active;
    for (std::size_t i = 0; i < joinables_.size(); ++i) {
      joinables_[i]->mirror_step(
          {round.active_ranks, round.first, round.synchronizes, round.trains[i]});
    }
  }
  for (Joinable* joinable : joinables_) joinable->take_over(last_rank);
}

void JoinScope::fail(const std::exception_ptr& why) {
  if (ends_on_all_) return;
  const std::string text = group::first_line_of(why).text();
  for (Joinable* joinable : joinables_) joinable->fail(text);
}

}  // namespace parallel::detail

void join(std::vector<Joinable*> joinables, const std::function<void()>& steps,
          JoinOptions options) {
  if (joinables.empty()) throw Error(Blame::Caller, "join: no objects are given");
  if (std::find(joinables.begin(), joinables.end(), nullptr) != joinables.end()) {
    throw Error(Blame::Caller, "join: one of the objects is a null pointer");
  }
  if (!options.enable) return steps();
  parallel::detail::JoinScope scope(std::move(joinables), options);
  try {
    steps();
    scope.run_out();
  } catch (...) {
    scope.fail(std::current_exception());
    throw;
  }
}  // NOLINT(clang-analyzer-core.StackAddressEscape): ~JoinScope() resets the pointer to `scope`

}  // namespace weft
