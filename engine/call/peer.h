// SPDX-License-Identifier: Apache-2.0
// The connections of one agent: one to each worker that it calls, made at the first call, by which
// calls are sent and replies arrive (Peer); and one from each worker that calls it (Inbound). So
// the two sides need not agree which of them connects.
//
// First of all the connecting side says which worker it is and shows the job's token. If there is a
// secret, both sides prove before that that they know it. See docs/wire.md.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include <weft/engine/call/core.h>
#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/secret.h>

namespace weft::rpc {

enum class Failure {
  Refused,     // the value that it was called on does not exist, or its result cannot be sent
  Thrown,      // the function threw
  NotCreated,  // the value that it was called on was not created
  Unread,      // refused before its arguments were read: none of its references is known here
};

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
  struct Lane {
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
  Lane lane(const transport::Routes& routes);
  // Whether anything has come by the connection of that number.
  bool has_heard_by(std::uint64_t lane) const { return heard_by_ == lane; }
  // Sends the worker a liveness probe, for a process that has not joined. The answer comes as the
  // reply to the call of that number.
  void knock(const Lane& lane, std::uint64_t call);
  // The present connection; empty if there is none.
  Lane standing_lane() const;
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
  std::shared_ptr<transport::Connection> connect(
      AgentCore& core,
      const transport::Routes& routes) const;  // requires mutex_
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
  mutable std::mutex mutex_;
  Lane lane_;
  // Transports whose connection ended before anything came by it.
  transport::Routes::Failed failed_;
  std::optional<Error> closed_;  // why no connection is made any more
};

// The rank in the Hello of a process that has not joined and only sends a liveness probe.
constexpr int kAsksForSign = -2;

struct FailureRecord;

class Inbound : public std::enable_shared_from_this<Inbound> {
 public:
  Inbound(std::weak_ptr<AgentCore> core, std::shared_ptr<transport::Connection> connection,
          bool carries_devices)
      : core_(std::move(core)),
        connection_(std::move(connection)),
        map_(carries_devices ? nullptr : std::make_shared<const DeviceMap>()) {}
  void start();
  void close(const Error& why) noexcept;
  // The worker at the other end; its rank is -1 until it has said which worker it is.
  WorkerInfo worker() const;
  Generation generation() const;

  // Answers a call. If the result cannot be packed or sent, the answer is a failure. Faults count
  // the message as `kind`.
  void reply(std::uint64_t call, MessageKind kind, const Function& function, const CallState& state,
             const std::function<void(codec::Packer&)>& pack) noexcept;
  void fail(std::uint64_t call, MessageKind kind, Failure what, const Error& error) noexcept;
  // The program's function that has run for longest; null where none runs.
  std::shared_ptr<const CallState> longest_running() const;
  // The call of that number, while it runs here; else null.
  std::shared_ptr<const CallState> call(std::uint64_t number) const;
  // The caller could not read that reply: the references in it end.
  void take_back(std::uint64_t call);
  // Takes the references in replies that may not have arrived.
  std::vector<std::shared_ptr<SentReferences>> take_given();

 private:
  void arrived(const transport::Arrival& arrival);
  void greeting_overdue();
  void challenged(const AgentCore& core, const transport::Arrival& arrival);
  void refuse(const AgentCore& core, const std::string& wrong);
  void deliver(const std::shared_ptr<AgentCore>& core, Message message, const Error* lacking);
  void greeted(const std::shared_ptr<AgentCore>& core, const Message& message);
  void answer_knock(std::uint64_t call);
  void call_came(const std::shared_ptr<AgentCore>& core, Message message, const Error* lacking);
  Slot slot_for(const AgentCore& core, const Head& head) const;
  void ended(const Error& why);
  void send_failure(AgentCore& core, std::uint64_t call, MessageKind kind, Failure what,
                    const Error& error) noexcept;
  void send_failure_of(const Head& head, const std::shared_ptr<const FailureRecord>& record);
  // Watches the sending of a reply. `undo` undoes the records of it if it is not sent.
  void watch(const Op& op, std::uint64_t call, const std::function<void()>& undo);
  // Tells the caller that its reply was not sent, and why.
  void reply_refused(std::uint64_t call, MessageKind kind, const Error& why);
  void check_unchanged(const Function& function, const codec::SentBytes& sent) const;
  // Remembers the references in a reply until it is known whether they have arrived.
  void keep_given(std::uint64_t call, const std::shared_ptr<SentReferences>& references);
  void forget(std::uint64_t call, std::uint64_t bytes, const Error* error = nullptr);
  // The map for results: the inverse of the caller's map. Throws NotThere if the caller has left.
  std::shared_ptr<const DeviceMap> map_of_results(AgentCore& core);

  const std::weak_ptr<AgentCore> core_;
  const std::shared_ptr<transport::Connection> connection_;
  // Used on the loop, before the peer is known.
  struct Nonces {
    Nonce of_connector;
    Nonce of_listener;
  };
  std::optional<Nonces> nonces_;  // set when the peer has sent its nonce
  bool proven_ = false;           // the peer has proved that it knows the secret
  // Set when the peer is known. Used on the loop only, for each message.
  std::shared_ptr<Callers::Counts> counts_;
  std::atomic<bool> closed_{false};  // messages that have not been read by then are dropped
  std::atomic<int> unsent_{0};       // failures that wait for room on the connection
  mutable std::mutex mutex_;
  std::optional<WorkerInfo> worker_;
  EventLoop::Registration greeting_;  // the time limit for the Hello, until it has come
  Generation generation_ = 0;
  // For a connection without device memory, the map of a caller whose map has no GPUs; otherwise
  // set when it is first needed.
  std::shared_ptr<const DeviceMap> map_;
  std::unordered_map<std::uint64_t, std::shared_ptr<CallState>> calls_;       // that run here
  std::unordered_map<std::uint64_t, std::shared_ptr<SentReferences>> given_;  // by call
  std::size_t prune_at_ = 64;  // size of given_ at which it is pruned
};

// The body of a Hello.
struct HelloRecord {
  std::uint32_t version = kWireVersion;
  std::string token;
  WorkerInfo from;
  WorkerInfo to;
  Generation from_life = 0;
  Generation to_life = 0;
  WEFT_FIELDS(version, token, from, to, from_life, to_life)
};

// The body of a Failure.
struct FailureRecord {
  int what = 0;  // Failure
  int blame = 0;
  std::string text;
  std::vector<int> ranks{};  // as Error::ranks()
  WEFT_FIELDS(what, blame, text, ranks)
};

}  // namespace weft::rpc
