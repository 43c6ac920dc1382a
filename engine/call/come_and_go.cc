// SPDX-License-Identifier: Apache-2.0
// Workers that come and go: how a worker hears of the others, and how it reacts when one is lost.
// Each worker watches those of the next lower and the next higher rank by a connection. If a
// watched worker does not answer liveness probes, its watcher declares it lost in the job's store.
// All others hear of the loss from there, even those that never spoke to the lost worker
// (docs/rpc.md, "Open jobs").
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/peer.h>

namespace weft::rpc {

namespace {

constexpr int kKnocks = 3;  // the fault that broke one connection may break the next

Error loss_of(const WorkerInfo& worker, const std::string& why) {
  return Error(Blame::PeerLost, describe(worker) + " is lost: " + why);
}

}  // namespace

// Asks a worker whether it lives, while this worker has not joined yet. Others take no calls from a
// process without identity; the knock is the only message that they answer.
std::optional<Error> AgentCore::knock(const Directory::Entry& worker, Deadline deadline) {
  std::optional<Error> lost;
  for (int time = 0; time < kKnocks; ++time) {
    const auto peer =
        std::make_shared<Peer>(weak_from_this(), parts_.self, worker, DeviceMaps(),
                               std::make_shared<BytesInFlight>(0, nullptr), /*greets=*/false);
    const Function& function = detail::Called<detail::FunctionBody<&internal::alive>>::entered;
    Promise<void> promise(thread_pool_);
    const auto answered = promise.future();
    const auto lane = peer->lane(routes_);
    const std::uint64_t id = next_call();
    const auto limit = std::max(std::chrono::milliseconds(1), deadline.remaining());
    add_waiting(id, function,
                {{worker.worker.rank, worker.generation}, limit, MessageKind::Shutdown},
                Deadline::in(limit), std::make_unique<PendingResult<void>>(std::move(promise)),
                {lane.number, 0, peer->in_flight()}, nullptr);
    peer->knock(lane, id);
    if (peer->standing_lane().number != lane.number) {  // it ended before add_waiting()
      fail_here(id, Error(Blame::PeerLost, "its connection has ended"));
    }
    std::optional<Error> error;
    try {
      answered.get();
    } catch (const Error& caught) {
      error = caught;
    }
    peer->close(Error(Blame::Cancelled, "it was asked only for a liveness probe"));
    if (!error) return std::nullopt;
    if (!ends_connection(error->blame())) throw Error(*error);
    lost = std::move(error);
  }
  return lost;
}

// The connection carried nothing but that knock.
void AgentCore::knock_ended(const WorkerInfo& worker, std::uint64_t lane, const Error& why) {
  fail(calls_.take_all_to(worker.rank, lane), [&](const WaitingCall&) {
    return Error(why.blame(),
                 "the connection to " + describe(worker) + " has ended: " + why.text());
  });
}

void AgentCore::follow_others(long announcements) {
  for (const Member& worker : directory_.members()) {
    if (worker.worker.rank != parts_.self.rank) present_.add(worker);
  }
  auto follower = std::make_unique<Follower>(
      parts_.announcements, announcements,
      [weak = weak_from_this()](const Announcement& announcement) {
        const auto core = weak.lock();
        if (core && !core->closed()) core->heard(announcement);
      },
      [weak = weak_from_this()](const Error& why) {
        const auto core = weak.lock();
        if (core && !core->closed()) core->store_lost(why);
      });
  {
    std::lock_guard lock(mutex_);
    follower_ = std::move(follower);
  }
  watch_neighbours();
}

void AgentCore::heard(const Announcement& announcement) {
  try {
    const auto& [standing, worker, generation, why] = announcement;
    if (worker.rank == parts_.self.rank && generation == generation_) {
      if (standing == static_cast<int>(Standing::Lost)) taken_for_lost(why);
    } else if (standing == static_cast<int>(Standing::Joined)) {
      came(worker.rank);
    } else if (standing == static_cast<int>(Standing::Lost)) {
      worker_gone({worker, generation}, loss_of(worker, why));
    } else if (present_.remove(worker.rank, generation)) {
      directory_.forget_before(worker.rank, generation + 1);
      watch_neighbours();
    }
  } catch (const Error& error) {
    log::warn(describe(parts_.self) +
              " cannot follow the workers that come and go: " + error.text());
  }
}

// Reads the worker's record, which is never older than its announcement.
void AgentCore::came(int rank) {
  if (rank == parts_.self.rank) return;
  const auto record = directory_.look(rank);
  if (!record || !record->stands(Standing::Joined))
    return;  // the newer standing will be announced as well
  const Member worker{{record->name, rank}, record->generation};
  // A worker's loss may be announced after its successor has joined. The program must hear of the
  // loss first.
  for (const Member& replaced : present_.replaced_by(worker)) {
    Predecessor fate = record->before;
    if (replaced.worker.rank != rank) {
      const auto its = directory_.look(replaced.worker.rank);
      fate = its && its->generation == replaced.generation
                 ? Predecessor{its->name, its->generation, its->standing, its->why}
                 : Predecessor();
    }
    if (fate.generation == replaced.generation &&
        fate.standing == static_cast<int>(Standing::Left)) {
      present_.remove(replaced.worker.rank, replaced.generation);
    } else {
      const bool is_known = fate.generation == replaced.generation && !fate.why.empty();
      worker_gone(replaced,
                  loss_of(replaced.worker,
                          is_known ? fate.why : describe(worker.worker) + " has taken its place"));
    }
  }
  bool is_untold = false;
  {
    std::lock_guard lock(mutex_);
    if (!present_.add(worker)) return;
    is_untold = news_.add_joined(worker.worker);
  }
  if (is_untold) tell_news();
  watch_neighbours();
}

void AgentCore::watch_neighbours() {
  for (const int rank : present_.new_neighbours(parts_.self.rank))
    look_after(rank, Asked::ByTheWay);
}

// Declares a worker lost that does not answer this one. Blocks on the store.
void AgentCore::declare_lost(const Member& worker, const Error& why) {
  std::string text =
      "it does not answer the liveness probe of " + describe(parts_.self) + ": " + why.text();
  bool is_lost = true;
  try {
    is_lost = directory_.declare_lost(worker.worker.rank, worker.generation, text);
  } catch (const Error& error) {
    text +=
        "; the job's store, which that worker may have hosted, does not answer either, so no "
        "worker can join (" +
        error.text() + ")";
  }
  if (is_lost) worker_gone(worker, loss_of(worker.worker, text));
}

void AgentCore::worker_gone(const Member& worker, const Error& why) {
  const int rank = worker.worker.rank;
  directory_.forget_before(rank, worker.generation + 1);
  end_predecessors(rank, worker.generation + 1, why);
  std::shared_ptr<Peer> peer;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = peers_.find(rank);
        found != peers_.end() && found->second->generation() <= worker.generation) {
      peer = std::move(found->second);
      peers_.erase(found);
    }
  }
  if (peer) {
    loop_->post([self = shared_from_this(), peer, why] {
      if (const auto lane = peer->close(why); lane != 0) self->lane_ended(*peer, lane, why);
    });
  }
  thread_pool_->recall();  // wakes threads that wait in shutdown() for this worker
  bool is_untold = false;
  {
    // The lock keeps other threads from telling of the next worker of its rank or name in between.
    std::lock_guard lock(mutex_);
    if (!present_.remove(rank, worker.generation)) return;
    is_untold = news_.add_lost(worker.worker, why);
  }
  log::info(describe(parts_.self) + " hears that " + why.text());
  if (is_untold) tell_news();
  watch_neighbours();
}

void AgentCore::store_lost(const Error& why) {
  log::warn(
      describe(parts_.self) +
      " has lost the job's store: workers that know each other go on, and none can join or be "
      "looked up until the job "
      "is started again; the process that hosts it (rank 0, unless another was given) has ended: " +
      why.text());
  if (present_.find(0)) look_after(0);
}

// The others have forgotten this worker, so nothing that it does from now on has an effect: it
// leaves.
void AgentCore::taken_for_lost(const std::string& why) {
  log::warn(describe(parts_.self) + " leaves, because others have taken it for lost: " + why);
  if (taken_for_lost_) return;
  why_left_ = "others have taken it for lost: " + why;
  taken_for_lost_ = true;
  thread_pool_->run_beside(Task([self = shared_from_this()] { self->leave(); }));
}

void AgentCore::on_worker_lost(LostCallback callback) {
  require_open();
  if (!callback) throw Error(Blame::Caller, "rpc::Agent::on_worker_lost() was given no function");
  news_.on_lost(std::move(callback));
}

void AgentCore::on_worker_joined(JoinedCallback callback) {
  require_open();
  if (!callback) throw Error(Blame::Caller, "rpc::Agent::on_worker_joined() was given no function");
  news_.on_joined(std::move(callback));
}

// Runs the callbacks as a called function runs: on a thread that may block, with this agent as
// this_agent().
void AgentCore::tell_news() {
  auto state = std::make_shared<CallState>();
  state->caller = parts_.self;
  state->generation = generation_;
  thread_pool_->run(
      Task([self = shared_from_this(),
            execution_context = std::make_shared<CallExecutionContext>(shared_from_this(), state)] {
        const weft::detail::ExecutionContextScope scope(execution_context);
        self->news_.tell(describe(self->self()));
      }));
}

bool AgentCore::alive(const Destination& destination) {
  require_open();
  const auto is_self = [&](const auto& target) {
    using Target = std::decay_t<decltype(target)>;
    if constexpr (std::is_same_v<Target, std::string>) {
      return target == parts_.self.name;
    } else if constexpr (std::is_same_v<Target, int>) {
      return target == parts_.self.rank;
    } else {
      return target == parts_.self;
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
    const Recipient found = recipient(destination);  // asks the store: it may have joined just now
    return !is_lost(found.rank);
  } catch (const NotThere&) {
    return false;
  } catch (const Error& error) {
    if (error.blame() != Blame::PeerLost) throw;
    return false;  // without the store no worker can have joined
  }
}

}  // namespace weft::rpc
