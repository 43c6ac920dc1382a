// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <optional>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/shortage.h>
#include <weft/engine/call/connections.h>
#include <weft/engine/call/core.h>

namespace weft::call {

namespace {

// How often a process without descriptors looks for connections that make room.
constexpr auto kRest = std::chrono::milliseconds(100);

std::size_t others(const AgentCore& core) {
  return static_cast<std::size_t>(core.identity().world_size.value_or(0));
}

}  // namespace

Connections::Connections(AgentCore& core)
    : core_(core),
      routes_(core.options().transports),
      faults_(core, core.options().faults),
      early_(others(core)),
      strangers_(others(core)) {}

std::vector<transport::Offer> Connections::listen(const std::string& local_address,
                                                  bool carries_devices) {
  transport::ListenOptions options;
  options.loop = core_.loop();
  options.interface_address = local_address;
  options.accepted = [weak = core_.weak_from_this(),
                      carries_devices](std::shared_ptr<transport::Connection> connection) {
    if (const auto core = weak.lock())
      core->connections().accept(std::move(connection), carries_devices);
  };
  options.short_of_something = [weak = core_.weak_from_this()](const Error&) {
    if (const auto core = weak.lock()) core->connections().make_room();
  };
  return routes_.listen(options);
}

// Other workers may have joined earlier and have called already. The functions that they call must
// find all workers.
void Connections::begin() {
  std::deque<Early> early;
  {
    MutexLock lock(mutex_);
    joined_ = true;
    early = early_.take_all();
  }
  for (auto& one : early) serve(std::move(one.connection), one.carries_devices);
}

void Connections::accept(std::shared_ptr<transport::Connection> connection, bool carries_devices) {
  std::optional<Early> oldest;
  bool is_early = false;
  {
    MutexLock lock(mutex_);
    if (core_.closed()) return;
    is_early = !joined_;
    if (is_early) oldest = early_.add({std::move(connection), carries_devices});
  }
  if (oldest) turn_away(*oldest->connection, kTooManyStrangers);
  if (!is_early) serve(std::move(connection), carries_devices);
}

void Connections::turn_away(transport::Connection& connection, const char* why) {
  log::warn(describe(core_.self()) + " turned away " + connection.peer() + ": " + why);
  connection.turn_away(Error(Blame::PeerLost, why));
}

void Connections::make_room() {
  std::optional<Early> early;
  std::optional<std::shared_ptr<Inbound>> stranger;
  {
    MutexLock lock(mutex_);
    if (core_.closed() || (early_.is_empty() && strangers_.is_empty())) return;
    if (descriptors_left(1) == 0) {
      early = early_.make_room();
      if (!early) stranger = strangers_.make_room();
    }
  }
  if (early) turn_away(*early->connection, kNoDescriptorForStrangers);
  if (stranger) (*stranger)->turn_away(kNoDescriptorForStrangers);
  making_room_ = core_.loop()->at(Deadline::in(kRest), Task([weak = core_.weak_from_this()] {
                                    if (const auto core = weak.lock())
                                      core->connections().make_room();
                                  }));
}

void Connections::serve(std::shared_ptr<transport::Connection> connection, bool carries_devices) {
  if (carries_devices) {
    try {
      connection = core_.devices().cuda().connection_over(std::move(connection), core_.loop());
    } catch (const Error& error) {
      return log::warn(describe(core_.self()) +
                       " refused a connection that carries device memory: " + error.text());
    }
  }
  const auto inbound =
      std::make_shared<Inbound>(core_.weak_from_this(), std::move(connection), carries_devices);
  std::optional<std::shared_ptr<Inbound>> oldest;
  {
    MutexLock lock(mutex_);
    if (core_.closed()) return;
    inbound_.emplace(inbound.get(), inbound);
    oldest = strangers_.add(inbound);
  }
  if (oldest) (*oldest)->turn_away(kTooManyStrangers);
  inbound->start();
}

void Connections::greeted(const std::shared_ptr<Inbound>& inbound) {
  MutexLock lock(mutex_);
  strangers_.remove(inbound);
}

std::shared_ptr<Peer> Connections::peer(const Recipient& to) {
  for (int again = 0;; ++again) {
    std::shared_ptr<Peer> other;  // a peer of another generation that has the rank
    {
      MutexLock lock(mutex_);
      if (const auto found = peers_.find(to.rank); found != peers_.end()) {
        if (to.fits(found->second->generation())) return found->second;
        other = found->second;
        if (other->generation() < to.generation) peers_.erase(found);
      }
    }
    if (other && to.generation < other->generation()) {
      // The outdated generation may come from the directory.
      core_.directory().known().forget_before(to.rank, other->generation());
      throw has_left(to);
    }
    if (other) {  // it has left, but its connection has not ended yet
      close_on_loop(other, Error(Blame::PeerLost, describe(other->worker()) + " has left"));
    }
    Directory::Entry entry = found(to);
    // False if a successor was met before the store's list named it.
    if (!core_.members().meets(entry.worker, entry.generation)) {
      core_.directory().known().forget_before(to.rank, entry.generation + 1);
      if (to.generation != kAnyGeneration || again > 1) throw has_left(to);
      continue;
    }
    auto peer = made(std::move(entry));
    MutexLock lock(mutex_);
    core_.lifetime().require_open();  // leave() has closed only the peers that it found
    const auto& known = peers_.emplace(to.rank, std::move(peer)).first->second;
    if (to.fits(known->generation())) return known;
  }
}

std::shared_ptr<Peer> Connections::made(Directory::Entry entry) {
  auto bytes =
      std::make_shared<BytesInFlight>(static_cast<std::uint64_t>(core_.options().bytes_in_flight),
                                      [loop = std::weak_ptr(core_.loop())](const void* turn) {
                                        if (const auto alive = loop.lock()) alive->recall(turn);
                                      });
  return std::make_shared<Peer>(core_.weak_from_this(), core_.self(), std::move(entry),
                                core_.devices().maps(), std::move(bytes));
}

Directory::Entry Connections::found(const Recipient& to) {
  const KnownDevices here{core_.self().name, core_.devices().described()};
  const auto find = [&] {
    auto found = core_.directory().find(to);
    // A worker that joined later was not checked when this one joined.
    if (!core_.identity().world_size)
      check_device_maps({here, {found.worker.name, found.devices}}, /*more_may_come=*/true);
    return found;
  };
  try {
    return find();
  } catch (const NotThere&) {
    throw;
  } catch (const Error&) {  // the entry may be a predecessor's
    if (!core_.directory().forget(to.rank)) throw;
    return find();
  }
}

std::shared_ptr<Peer> Connections::known_peer(int rank) const {
  MutexLock lock(mutex_);
  const auto found = peers_.find(rank);
  return found == peers_.end() ? nullptr : found->second;
}

Peer::Numbered Connections::standing(int rank, std::uint64_t number) const {
  const auto peer = known_peer(rank);
  auto standing = peer ? peer->standing_connection() : Peer::Numbered();
  return standing.number == number ? standing : Peer::Numbered();
}

void Connections::close_peer(const Member& worker, const Error& why) {
  std::shared_ptr<Peer> peer;
  {
    MutexLock lock(mutex_);
    if (const auto found = peers_.find(worker.worker.rank);
        found != peers_.end() && found->second->generation() <= worker.generation) {
      peer = std::move(found->second);
      peers_.erase(found);
    }
  }
  if (peer) close_on_loop(peer, why);
}

void Connections::close_on_loop(const std::shared_ptr<Peer>& peer, const Error& why) {
  core_.loop()->post([core = core_.shared_from_this(), peer, why] {
    if (const auto number = peer->close(why); number != 0)
      core->connections().ended(*peer, number, why);
  });
}

std::string Connections::transport_to(int rank) const {
  const auto known = known_peer(rank);
  const auto connection = known ? known->standing_connection().connection : nullptr;
  return connection ? std::string(connection->transport()) : std::string();
}

void Connections::off_loop(const Recipient& to, Task task) {
  bool is_known = core_.identity().world_size.has_value() || !core_.loop()->inside();
  if (!is_known) {
    const auto known = known_peer(to.rank);
    is_known = known && to.fits(known->generation());
  }
  is_known ? task() : core_.thread_pool()->run_beside(std::move(task));
}

std::string Connections::name_of(int rank) const {
  if (rank == core_.self().rank) return describe(core_.self());
  if (const auto known = core_.directory().known().worker(rank)) return describe(*known);
  const auto known = known_peer(rank);
  return known ? describe(known->worker()) : "rank " + std::to_string(rank);
}

std::vector<std::shared_ptr<Inbound>> Connections::inbound() const {
  std::vector<std::shared_ptr<Inbound>> all;
  MutexLock lock(mutex_);
  for (const auto& [key, inbound] : inbound_) all.push_back(inbound);
  return all;
}

void Connections::close_predecessors(int rank, Generation generation, const Error& why) {
  for (const auto& inbound : inbound()) {
    if (inbound->worker().rank == rank && inbound->generation() < generation) inbound->close(why);
  }
}

void Connections::ended(Peer& peer, std::uint64_t connection_number, const Error& why) {
  const WorkerInfo worker = peer.worker();
  std::shared_ptr<Peer> gone;
  // Another worker may have the rank by now. Forget the old one first, so that a program that calls
  // again when a call fails below does not call it.
  const bool is_forgotten = core_.directory().forget(worker.rank);
  {
    MutexLock lock(mutex_);
    if (const auto known = peers_.find(worker.rank);
        is_forgotten && known != peers_.end() && known->second.get() == &peer) {
      gone = std::move(known->second);
      peers_.erase(known);
    }
  }
  if (gone) {
    // The peer may have a new connection by now, for a call that waits already.
    const std::uint64_t newer = gone->close(Error(Blame::PeerLost, why.text()));
    if (newer != 0) ended(*gone, newer, why);
  }
  auto given = core_.outgoing_calls().connection_ended(worker, connection_number, why);
  off_loop(worker.rank,
           Task([core = core_.shared_from_this(), rank = worker.rank, given = std::move(given)] {
             if (!core->closed()) core->extensions().references().ask_which_arrived(rank, given);
           }));
  core_.liveness().look_after(worker.rank);
}

void Connections::ended(Inbound& inbound, const Error& why) {
  std::shared_ptr<Inbound> ended;
  {
    MutexLock lock(mutex_);
    const auto found = inbound_.find(&inbound);
    if (found == inbound_.end()) return;
    ended = std::move(found->second);
    inbound_.erase(found);
    strangers_.remove(ended);
  }
  const WorkerInfo worker = ended->worker();
  log::debug(describe(core_.self()) + ": the connection from " + describe(worker) +
             " has ended: " + why.text());
  core_.directory().forget(worker.rank);
  off_loop(worker.rank,
           Task([core = core_.shared_from_this(), rank = worker.rank, given = ended->take_given()] {
             if (!core->closed()) core->extensions().references().ask_which_arrived(rank, given);
           }));
  core_.liveness().look_after(worker.rank);
}

void Connections::All::close(const Error& why) const {
  for (const auto& [rank, one] : peers) one->close(why);
  for (const auto& [key, one] : inbound) one->close(why);
  for (const auto& one : early) one.connection->close(why);
}

Connections::All Connections::take_all() {
  All all;
  MutexLock lock(mutex_);
  all.peers.swap(peers_);
  all.inbound.swap(inbound_);
  all.early = early_.take_all();
  strangers_.take_all();
  return all;
}

}  // namespace weft::call
