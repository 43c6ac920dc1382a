// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/log.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/call/job_members.h>

namespace weft::call {

namespace {

Error loss_of(const WorkerInfo& worker, const std::string& why) {
  return Error(Blame::PeerLost, describe(worker) + " is lost: " + why);
}

}  // namespace

void JobMembers::begin() {
  MutexLock lock(mutex_);
  generations_.emplace(core_.self().rank, core_.identity().generation);
}

void JobMembers::follow(long announcements) {
  for (const Member& worker : core_.directory().known().members()) {
    if (worker.worker.rank != core_.self().rank) present_.add(worker);
  }
  auto follower = std::make_unique<Follower>(
      announcements_, announcements,
      [weak = core_.weak_from_this()](const Announcement& announcement) {
        const auto core = weak.lock();
        if (core && !core->closed()) core->members().heard(announcement);
      },
      [weak = core_.weak_from_this()](const Error& why) {
        const auto core = weak.lock();
        if (core && !core->closed()) core->members().store_lost(why);
      });
  {
    MutexLock lock(mutex_);
    follower_ = std::move(follower);
  }
  watch_neighbours();
}

std::unique_ptr<Follower> JobMembers::stop_following() {
  std::unique_ptr<Follower> follower;
  {
    MutexLock lock(mutex_);
    follower = std::move(follower_);
  }
  if (follower) follower->stop();
  return follower;
}

void JobMembers::heard(const Announcement& announcement) {
  try {
    const auto& [standing, worker, generation, why] = announcement;
    if (worker.rank == core_.self().rank && generation == core_.identity().generation) {
      if (standing == static_cast<int>(Standing::Lost)) taken_for_lost(why);
    } else if (standing == static_cast<int>(Standing::Joined)) {
      joined(worker.rank);
    } else if (standing == static_cast<int>(Standing::Lost)) {
      lost({worker, generation}, loss_of(worker, why));
    } else if (present_.remove(worker.rank, generation)) {
      core_.directory().known().forget_before(worker.rank, generation + 1);
      watch_neighbours();
    }
  } catch (const Error& error) {
    log::warn(describe(core_.self()) +
              " cannot follow the workers that come and go: " + error.text());
  }
}

// Reads the worker's record, which is never older than its announcement.
void JobMembers::joined(int rank) {
  if (rank == core_.self().rank) return;
  const auto record = core_.directory().look(rank);
  if (!record || !record->stands(Standing::Joined))
    return;  // the newer standing will be announced as well
  const Member worker{{record->name, rank}, record->generation};
  // A worker's loss may be announced after its successor has joined. The program must hear of the
  // loss first.
  for (const Member& replaced : present_.replaced_by(worker)) {
    Predecessor fate = record->before;
    if (replaced.worker.rank != rank) {
      const auto its = core_.directory().look(replaced.worker.rank);
      fate = its && its->generation == replaced.generation
                 ? Predecessor{its->name, its->generation, its->standing, its->why}
                 : Predecessor();
    }
    if (fate.generation == replaced.generation &&
        fate.standing == static_cast<int>(Standing::Left)) {
      present_.remove(replaced.worker.rank, replaced.generation);
    } else {
      const bool is_known = fate.generation == replaced.generation && !fate.why.empty();
      lost(replaced,
           loss_of(replaced.worker,
                   is_known ? fate.why : describe(worker.worker) + " has taken its place"));
    }
  }
  bool is_untold = false;
  {
    MutexLock lock(mutex_);
    if (!present_.add(worker)) return;
    is_untold = news_.add_joined(worker.worker);
  }
  if (is_untold) tell_news();
  watch_neighbours();
}

void JobMembers::watch_neighbours() {
  for (const int rank : present_.new_neighbours(core_.self().rank))
    core_.liveness().look_after(rank, Liveness::Asked::ByTheWay);
}

void JobMembers::declare_lost(const Member& worker, const Error& why) {
  std::string text =
      "it does not answer the liveness probe of " + describe(core_.self()) + ": " + why.text();
  bool is_lost = true;
  try {
    is_lost = core_.directory().declare_lost(worker.worker.rank, worker.generation, text);
  } catch (const Error& error) {
    text +=
        "; the job's store, which that worker may have hosted, does not answer either, so no "
        "worker can join (" +
        error.text() + ")";
  }
  if (is_lost) lost(worker, loss_of(worker.worker, text));
}

void JobMembers::lost(const Member& worker, const Error& why) {
  const int rank = worker.worker.rank;
  core_.directory().known().forget_before(rank, worker.generation + 1);
  // The passes that the successor takes part in must not fail when the loss is heard late.
  if (end_predecessors(rank, worker.generation + 1, why))
    core_.extensions().worker_lost(rank, static_cast<std::uint16_t>(worker.generation + 1));
  core_.connections().close_peer(worker, why);
  core_.loop()->recall();  // wakes threads that wait in shutdown() for this worker
  bool is_untold = false;
  {
    // The lock keeps other threads from telling of the next worker of its rank or name in between.
    MutexLock lock(mutex_);
    if (!present_.remove(rank, worker.generation)) return;
    is_untold = news_.add_lost(worker.worker, why);
  }
  log::info(describe(core_.self()) + " hears that " + why.text());
  if (is_untold) tell_news();
  watch_neighbours();
}

void JobMembers::store_lost(const Error& why) {
  log::warn(
      describe(core_.self()) +
      " has lost the job's store: workers that know each other go on, and none can join or be "
      "looked up until the job "
      "is started again; the process that hosts it (rank 0, unless another was given) has ended: " +
      why.text());
  if (present_.find(0)) core_.liveness().look_after(0);
}

// The others have forgotten this worker, so nothing that it does from now on has an effect: it
// leaves.
void JobMembers::taken_for_lost(const std::string& why) {
  log::warn(describe(core_.self()) + " leaves, because others have taken it for lost: " + why);
  if (!core_.lifetime().taken_for_lost(why)) return;
  core_.thread_pool()->run_beside(Task([self = core_.shared_from_this()] { self->leave(); }));
}

void JobMembers::on_lost(LostCallback callback) {
  core_.lifetime().require_open();
  if (!callback) throw Error(Blame::Caller, "rpc::Agent::on_worker_lost() was given no function");
  news_.on_lost(std::move(callback));
}

void JobMembers::on_joined(JoinedCallback callback) {
  core_.lifetime().require_open();
  if (!callback) throw Error(Blame::Caller, "rpc::Agent::on_worker_joined() was given no function");
  news_.on_joined(std::move(callback));
}

void JobMembers::tell_lost(const WorkerInfo& worker, const Error& why) {
  if (news_.add_lost(worker, why)) tell_news();
}

// Runs the callbacks as a called function runs: on a thread that may block, with this agent as
// this_agent().
void JobMembers::tell_news() {
  auto state = std::make_shared<CallState>();
  state->caller = core_.self();
  state->generation = core_.identity().generation;
  core_.thread_pool()->run(Task(
      [self = core_.shared_from_this(), execution_context = std::make_shared<CallExecutionContext>(
                                            core_.shared_from_this(), state)] {
        const weft::detail::ExecutionContextScope scope(execution_context);
        self->members().news_.tell(describe(self->self()));
      }));
}

bool JobMembers::alive(const Destination& destination) {
  core_.lifetime().require_open();
  const auto is_self = [&](const auto& target) {
    using Target = std::decay_t<decltype(target)>;
    if constexpr (std::is_same_v<Target, std::string>) {
      return target == core_.self().name;
    } else if constexpr (std::is_same_v<Target, int>) {
      return target == core_.self().rank;
    } else {
      return target == core_.self();
    }
  };
  if (std::visit(is_self, destination.target())) return true;
  const auto is_known = [&](const auto& target) {
    using Target = std::decay_t<decltype(target)>;
    if constexpr (std::is_same_v<Target, std::string>) {
      return present_.has(target);
    } else if constexpr (std::is_same_v<Target, int>) {
      return present_.find(target).has_value();
    } else {
      const auto found = present_.find(target.rank);
      return found && found->worker == target;
    }
  };
  if (std::visit(is_known, destination.target())) return true;
  try {
    const Recipient found = core_.outgoing_calls().recipient(
        destination);  // asks the store: it may have joined just now
    return !core_.liveness().is_lost(found.rank);
  } catch (const NotThere&) {
    return false;
  } catch (const Error& error) {
    if (error.blame() != Blame::PeerLost) throw;
    return false;  // without the store no worker can have joined
  }
}

bool JobMembers::meets(const WorkerInfo& worker, Generation generation) {
  {
    MutexLock lock(mutex_);
    const auto met = generations_.try_emplace(worker.rank, 0).first;
    if (generation <= met->second) return generation == met->second;
    met->second = generation;
  }
  end_predecessors(worker.rank, generation,
                   Error(Blame::PeerLost, "it has left, and " + describe(worker) + " has come"));
  core_.extensions().worker_lost(worker.rank, static_cast<std::uint16_t>(generation));
  return true;
}

bool JobMembers::end_predecessors(int rank, Generation generation, const Error& why) {
  bool is_news = false;
  {
    MutexLock lock(mutex_);
    Generation& met = generations_[rank];
    is_news = met < generation;
    met = std::max(met, generation);
    if (met == generation) core_.liveness().heard_from(rank);
  }
  core_.connections().close_predecessors(rank, generation, why);
  return is_news;
}

bool JobMembers::has_successor(const WorkerGeneration& worker) const {
  if (core_.identity().world_size) return false;
  MutexLock lock(mutex_);
  const auto met = generations_.find(worker.rank);
  return met != generations_.end() && worker.is_before(static_cast<std::uint16_t>(met->second));
}

}  // namespace weft::call
