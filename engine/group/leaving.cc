// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/leaving.h>

namespace weft::group {

namespace {

// Warns of messages from other ranks that this rank has not received.
void warn_of_unreceived(Core& core) {
  if (core.failure.is_broken()) return;
  std::vector<transport::PointToPoint::Unreceived> all;
  for (const auto& communicator : core.carriers.communicators()) {
    transport::PointToPoint* const messages = communicator->point_to_point();
    if (messages == nullptr) continue;
    for (const auto& one : messages->unreceived()) all.push_back(one);
  }
  if (all.empty()) return;
  const auto& first = all.front();
  const std::string whose = " from rank " + std::to_string(first.from) + " (tag " +
                            std::to_string(first.tag) + ", " + std::to_string(first.bytes) +
                            " bytes)";
  const std::string who = "rank " + std::to_string(core.options.rank) + " leaves group '" +
                          core.options.name + "' and has never received ";
  constexpr const char* kRemedy = ": each send() needs a recv() of its tag";
  if (all.size() == 1) return log::warn(who + "1 message" + whose + kRemedy);
  log::warn(who + std::to_string(all.size()) + " messages, of which the first is" + whose +
            kRemedy);
}

// Waits until the others have completed the operations in which this rank took part. Returns the
// ranks that have not by the deadline.
std::vector<int> await_others(Core& core, Deadline deadline) {
  const auto known = [&](int rank) { return core.options.job->membership->has(rank); };
  Patience patience(core.options.job->waits->reports());
  std::chrono::milliseconds pause(20);  // until this rank says again that it leaves
  Deadline again = Deadline::in(pause);
  for (;;) {
    const Deadline turn = Deadline::sooner(patience.next(), again);
    std::vector<int> slow = core.ledger->await_others(known, Deadline::sooner(deadline, turn));
    if (slow.empty() || deadline.passed()) return slow;
    if (again.passed()) {
      // An answer may have been lost with a rank that has died or left meanwhile.
      if (!core.options.job->membership->is_whole()) core.ledger->say_leaving();
      again = Deadline::in(pause *= 2);
    }
    if (!patience.is_over()) continue;
    log::warn("rank " + std::to_string(core.options.rank) + " has waited " +
              describe_wait(patience.waited()) + " to leave group '" + core.options.name +
              "': " + ranks_have(slow) +
              " not completed the operations of this rank, and leaving earlier would discard "
              "bytes that are on their way");
  }
}

// Waits for this rank's operations, and until the others have completed them too. Returns an error
// for those that were not done within `limit`.
std::optional<Error> part(Core& core, std::chrono::milliseconds limit) {
  if (core.options.size == 1 || !core.options.job->connected) return std::nullopt;
  if (core.failure.is_broken()) {
    core.failure.tell_leaving();
    return std::nullopt;
  }
  const Deadline deadline = Deadline::in(limit);
  const std::string own = core.operations.wait_for_all(deadline);
  if (core.failure.is_broken()) {  // broken meanwhile
    core.failure.tell_leaving();
    return std::nullopt;
  }
  core.ledger->say_leaving();
  const std::vector<int> slow = await_others(core, deadline);
  warn_of_unreceived(core);
  if (!own.empty()) {
    return Error(Blame::Timeout, "leaving " + core.options.place() + ": " + own +
                                     ", which not all ranks have joined, has not ended " +
                                     "within " + describe(limit))
        .with_ranks(slow);
  }
  if (slow.empty()) return std::nullopt;
  return Error(Blame::Timeout, "leaving " + core.options.place() + ": within " + describe(limit) +
                                   " " + ranks_have(slow) +
                                   " not completed the operations of this rank")
      .with_ranks(slow);
}

// If an exception unwinds this thread's stack, tells the others so, and returns true: this rank
// waits for nobody then.
bool left_by_exception(Core& core) {
  if (std::uncaught_exceptions() == 0 || core.options.size == 1 || !core.options.job->connected ||
      core.failure.is_broken())
    return false;
  core.options.job->membership->send(
      {FrameType::Abort, 0, kLeftByException, core.options.name, "left the group by an exception"});
  return true;
}

}  // namespace

void leave_at_last(Core& core) {
  if (!core.operations.refuse_later() || left_by_exception(core)) return;
  if (const auto late = part(core, core.options.timeout)) log::error(late->text());
}

void leave(Core& core, std::chrono::milliseconds limit) {
  if (limit.count() <= 0) {
    throw Error(Blame::Caller, "leave " + core.options.place() + ": a limit of " + describe(limit) +
                                   "; it must be positive");
  }
  if (!core.operations.refuse_later()) core.operations.throw_if_left();
  if (left_by_exception(core)) return;
  if (const auto late = part(core, std::min(limit, kLongestTimeout))) throw Error(*late);
}

}  // namespace weft::group
