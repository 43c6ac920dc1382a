// SPDX-License-Identifier: Apache-2.0
// The outgoing connection of one agent to one worker: made at the first call, it carries calls
// there and their replies back. Calls from that worker come by a connection that the worker makes
// (inbound.h). So the two sides need not agree which of them connects.
//
// First of all the connecting side says which worker it is and shows the job's token. If there is a
// secret, both sides prove before that that they know it. See docs/wire.md.
//
// Owned by the agent's connections, and kept by the calls that use it. Usable from every thread;
// messages arrive on the loop. connection() blocks while it connects.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include <weft/base/mutex.h>
#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/gate.h>
#include <weft/engine/call/in_flight.h>
#include <weft/profiling/trace/depth.h>

namespace weft::call {

class AgentCore;

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // `maps` are this worker's own. A peer that does not greet only knocks.
  Peer(std::weak_ptr<AgentCore> core, const WorkerInfo& self, Directory::Entry entry,
       const DeviceMaps& maps, std::shared_ptr<BytesInFlight> bytes, bool greets = true)
      : core_(std::move(core)),
        greets_(greets),
        entry_(std::move(entry)),
        map_(DeviceMap::to(entry_.worker.name, maps)),
        map_back_(DeviceMap::to(self.name, entry_.devices.maps).inverse()),
        in_flight_(trace::depth(trace::Queue::Calls, entry_.worker.name)),
        bytes_(std::move(bytes)) {}

  // One connection, with a number of its own.
  struct Numbered {
    std::shared_ptr<transport::Connection> connection;
    std::uint64_t number = 0;
    std::shared_ptr<Gate> gate;  // set if there is a secret
    // Runs `send`, which sends over the connection: at once, or when the worker has proved itself.
    template <class F>
    void pass(F send) const {
      if (gate) return gate->pass(Task(std::move(send)));
      send();
    }
  };
  // Returns the connection, and makes it if there is none. One that was lost is made again, over
  // the next transport if nothing had come by it. Throws Unsupported if no transport reaches the
  // worker, Caller if only one of the two has a secret.
  Numbered connection(const transport::Routes& routes);
  // Whether anything has come by the connection of that number.
  bool has_heard_by(std::uint64_t connection_number) const {
    return heard_by_ == connection_number;
  }
  // Sends the worker a liveness probe, for a process that has not joined. The answer comes as the
  // reply to the call of that number.
  void knock(const Numbered& to, std::uint64_t call);
  // The present connection; empty if there is none.
  Numbered standing_connection() const;
  const WorkerInfo& worker() const { return entry_.worker; }
  Generation generation() const { return entry_.generation; }
  const Member& member() const { return entry_; }
  // The maps for tensors that are sent to the worker: in calls, and back along its own calls to
  // this one.
  const DeviceMap& map() const { return map_; }
  const DeviceMap& map_back() const { return map_back_; }
  trace::Depth& in_flight() const { return in_flight_; }
  const std::shared_ptr<InFlight>& unanswered() const { return unanswered_; }
  const std::shared_ptr<BytesInFlight>& bytes() const { return bytes_; }  // bytes of the same calls
  // Closes the connection for good, and returns its number; 0 if there was none.
  std::uint64_t close(const Error& why) noexcept;

 private:
  std::shared_ptr<transport::Connection> connect(AgentCore& core,
                                                 const transport::Routes& routes) const
      WEFT_REQUIRES(mutex_);
  void greet(AgentCore& core, transport::Connection& connection);
  void arrived(std::uint64_t number, transport::Connection& connection,
               const transport::Arrival& arrival);
  void answered(std::uint64_t number, transport::Connection& connection, Gate& gate,
                const transport::Arrival& arrival);
  void ended(std::uint64_t number, const Error& why);

  const std::weak_ptr<AgentCore> core_;
  const bool greets_;
  const Directory::Entry entry_;
  const DeviceMap map_;
  const DeviceMap map_back_;
  trace::Depth& in_flight_;  // calls to it
  const std::shared_ptr<InFlight> unanswered_ = std::make_shared<InFlight>(0);
  const std::shared_ptr<BytesInFlight> bytes_;
  // Number of the last connection by which anything has come.
  std::atomic<std::uint64_t> heard_by_{0};
  mutable Mutex mutex_;
  Numbered present_ WEFT_GUARDED_BY(mutex_);
  // Transports whose connection ended before anything came by it.
  transport::Routes::Failed failed_ WEFT_GUARDED_BY(mutex_);
  // Why no connection is made any more.
  std::optional<Error> closed_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
