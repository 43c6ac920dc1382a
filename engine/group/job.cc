// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/error.h>
#include <weft/base/op.h>
#include <weft/engine/group/job.h>

namespace weft::group {

namespace {

constexpr auto kPatience = std::chrono::seconds(5);  // for the GPU's work with retired memory

}  // namespace

void finish_turn(EventLoop& loop) {
  std::atomic<bool> done{false};
  loop.post([&done] { done = true; });
  loop.drive([&done] { return done.load(); });
}

Job::~Job() {
  const bool is_on_loop = loop && loop->inside();
  continuations->stop(/*waits=*/!is_on_loop && !Op::ending());
  if (!loop || is_on_loop) return;
  looked_into.reset();  // may wait for other ranks, and they for this one's membership
  if (membership) {
    membership->leave();
    membership.reset();
    finish_turn(*loop);  // drops what the membership had, such as the store
  }
  // Objects that the loop kept alive retire their memory when it is destroyed.
  loop.reset();
  devices->reclaim(Deadline::in(kPatience));
}

c10::intrusive_ptr<c10d::Store> kept_by_members(const CoreOptions& group) {
  const Job& job = *group.job;
  if (!job.connected || group.size == 1) return {};
  for (const int rank : group.global_ranks) {
    if (!job.membership->has(rank)) return {};
  }
  return c10::make_intrusive<c10d::PrefixStore>(
      "group " + group.name, job.stores->at(group.global_ranks.front(), group.timeout));
}

std::string CoreOptions::place() const { return "on " + self(); }

std::string CoreOptions::self() const {
  return "group '" + name + "' (rank " + std::to_string(rank) + " of " + std::to_string(size) +
         (place_in_mesh.empty() ? "" : ", " + place_in_mesh) + ")";
}

void CoreOptions::check_rank(int which, const char* what) const {
  if (which < 0 || which >= size) {
    throw Error(Blame::Caller, std::string(what) + " " + std::to_string(which) +
                                   " is not a rank of the group; they go from 0 to " +
                                   std::to_string(size - 1) + " " + place());
  }
}

}  // namespace weft::group
