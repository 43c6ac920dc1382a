// SPDX-License-Identifier: Apache-2.0
// The connections of one agent: one to each worker that it calls (peer.h), and those from the
// workers that call it (inbound.h). Owned by AgentCore, and declared before the thread pool: making
// the routes may throw, and the pool's threads begin at once.
//
// Usable from every thread. peer() blocks on the store where a worker must be looked up, and
// connect() while it connects. The mutex is held only for this class's own members.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/strangers.h>
#include <weft/base/task.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/inbound.h>
#include <weft/engine/call/injected_faults.h>
#include <weft/engine/call/peer.h>
#include <weft/engine/call/types.h>
#include <weft/transport/routes.h>

namespace weft::call {

class AgentCore;

class Connections {
 public:
  explicit Connections(AgentCore& core);

  // Accepts connections, and returns the offers for the directory. Those accepted before begin()
  // wait for it.
  std::vector<transport::Offer> listen(const std::string& local_address, bool carries_devices);
  // This worker has joined: from now on, connections are read.
  void begin();

  // --- outgoing
  // The peer that has this rank and fits this generation. Throws NotThere if it is not in the job.
  std::shared_ptr<Peer> peer(const Recipient& to);
  // Returns the peer of that rank, or null if this agent has not called it. Asks no store and makes
  // no connection.
  std::shared_ptr<Peer> known_peer(int rank) const;
  // Returns the peer's connection; makes it at the first call, and again after it has ended.
  Peer::Numbered connect(Peer& peer) { return peer.connection(routes_); }
  // The connection of that number to the worker; empty if it has ended.
  Peer::Numbered standing(int rank, std::uint64_t number) const;
  // Numbers all connections to other workers in one series, so that connections to two workers of
  // one rank differ.
  std::uint64_t next_number() { return ++numbers_; }
  // The worker is lost: closes the connection to it.
  void close_peer(const Member& worker, const Error& why);
  // Empty if there is no connection to that worker.
  std::string transport_to(int rank) const;
  InjectedFaults& faults() { return faults_; }
  // Runs a task that sends to that worker. If its address must be looked up in the store, which may
  // not answer, the task does not run in a turn of the loop but on the thread pool.
  void off_loop(const Recipient& to, Task task);
  // "worker2 (rank 2)" if the name is known without asking the store, else "rank 2".
  std::string name_of(int rank) const;

  // --- incoming
  std::vector<std::shared_ptr<Inbound>> inbound() const;
  // Closes the connections from earlier workers of that rank.
  void close_predecessors(int rank, Generation generation, const Error& why);

  // --- called by connections
  void ended(Peer& peer, std::uint64_t connection_number, const Error& why);
  void ended(Inbound& inbound, const Error& why);
  // The worker at the other end is known.
  void greeted(const std::shared_ptr<Inbound>& inbound);

  struct Early {
    std::shared_ptr<transport::Connection> connection;
    bool carries_devices = false;
  };
  struct All {
    std::map<int, std::shared_ptr<Peer>> peers;
    std::map<const Inbound*, std::shared_ptr<Inbound>> inbound;
    std::deque<Early> early;
    void close(const Error& why) const;
  };
  // For an agent that has been closed: takes all connections, which the caller closes. None is
  // added later.
  All take_all();
  void stop_listening() { routes_.close(); }

 private:
  void accept(std::shared_ptr<transport::Connection> connection, bool carries_devices);
  void serve(std::shared_ptr<transport::Connection> connection, bool carries_devices);
  void turn_away(transport::Connection& connection, const char* why);
  // The process has no descriptor left for a connection. On the loop.
  void make_room();
  std::shared_ptr<Peer> made(Directory::Entry entry);
  Directory::Entry found(const Recipient& to);
  // Closes the peer's connection on the loop.
  void close_on_loop(const std::shared_ptr<Peer>& peer, const Error& why);

  AgentCore& core_;
  transport::Routes routes_;
  std::atomic<std::uint64_t> numbers_{0};
  InjectedFaults faults_;
  mutable Mutex mutex_;
  std::map<int, std::shared_ptr<Peer>> peers_ WEFT_GUARDED_BY(mutex_);
  std::map<const Inbound*, std::shared_ptr<Inbound>> inbound_ WEFT_GUARDED_BY(mutex_);
  // Accepted before this worker had joined.
  Strangers<Early> early_ WEFT_GUARDED_BY(mutex_);
  // Accepted later, without a hello so far.
  Strangers<std::shared_ptr<Inbound>> strangers_ WEFT_GUARDED_BY(mutex_);
  bool joined_ WEFT_GUARDED_BY(mutex_) = false;
  EventLoop::Registration making_room_;  // used on the loop only
};

}  // namespace weft::call
