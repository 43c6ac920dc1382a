// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/group/access.h>
#include <weft/engine/group/core.h>

namespace weft::group {

bool are_same(const ProcessGroup& one, const ProcessGroup& other) {
  return &Core::of(one) == &Core::of(other);
}

std::string place_of(const ProcessGroup& group) { return Core::of(group).options.place(); }

std::chrono::milliseconds timeout_of(const ProcessGroup& group) {
  return Core::of(group).options.timeout;
}

void check_rank(const ProcessGroup& group, int rank, const char* what) {
  Core::of(group).options.check_rank(rank, what);
}

c10::Device host_values_device(const ProcessGroup& group) {
  return Core::of(group).carriers.host_values_device();
}

c10::Device barrier_device(const ProcessGroup& group) {
  return Core::of(group).carriers.barrier_device();
}

bool has_left(const ProcessGroup& group, int rank) {
  return Core::of(group).ledger->member_has_left(rank);
}

void throw_if_refused(const ProcessGroup& group) { Core::of(group).operations.throw_if_refused(); }

void refuse_capture(const ProcessGroup& group, const c10::Device& device, const char* what,
                    const char* why) {
  Core::of(group).options.job->devices->refuse_capture(device, what, why);
}

void fail(const ProcessGroup& group, const Error& why) { Core::of(group).failure.fail(why); }

WeakGroup::WeakGroup(const ProcessGroup& group) : core_(Core::of(group).weak_from_this()) {}

std::shared_ptr<Core> WeakGroup::in_company() const {
  auto core = core_.lock();
  return core && core->options.size > 1 ? std::move(core) : nullptr;
}

void WeakGroup::fail(const Error& why) const {
  if (const auto core = in_company()) core->failure.fail(why);
}

void WeakGroup::abort(const std::string& reason) const {
  if (const auto core = in_company()) core->failure.abort(reason);
}

int next_number(const ProcessGroup& group, const std::string& kind) {
  return Core::of(group).numbers.next(kind);
}

StoreBootstrap& store_of(const ProcessGroup& group) { return *Core::of(group).bootstrap; }

StoreBootstrap uninterrupted_store_of(const ProcessGroup& group) {
  return StoreBootstrap(Core::of(group).options.own_store);
}

const std::shared_ptr<Continuations>& continuations_of(const ProcessGroup& group) {
  return Core::of(group).options.job->continuations;
}

LocalWait local_wait(const ProcessGroup& group, std::string what, std::string hint) {
  const CoreOptions& options = Core::of(group).options;
  return {options.job->waits, options.name, std::move(what), options.rank, std::move(hint)};
}

}  // namespace weft::group
