// The connections of one agent. To each worker that it calls, one, made at the first call: calls go
// out on it and replies come back (Peer). From each worker that calls it, one (Inbound). So neither
// side needs to agree who connects.
//
// Before anything else the connecting side says who it is and shows the job's token; where there is
// a secret, both sides prove before that that they know it. See docs/wire.md.
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
  Refused,     // the value that it was called on is not there, or its result cannot travel
  Thrown,      // it threw
  NotCreated,  // the value that it was called on was not created
  Unread,      // refused before its arguments had been taken: no reference in it is known here
};

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // `maps` are this worker's own. One that does not greet only knocks.
  Peer(std::weak_ptr<AgentCore> core, const WorkerInfo& self, Directory::Entry entry,
       const DeviceMaps& maps, std::shared_ptr<BytesInFlight> bytes, bool greets = true)
      : core_(std::move(core)),
        greets_(greets),
        entry_(std::move(entry)),
        map_(DeviceMap::to(entry_.worker.name, maps)),
        map_back_(DeviceMap::to(self.name, entry_.devices.maps).inverse()),
        in_flight_(trace::depth(trace::Queue::Calls, entry_.worker.name)),
        bytes_(std::move(bytes)) {}

  // The connection, made if there is none; each has a number of its own. Throws Unsupported where
  // no transport reaches the worker, Caller where only one of the two has a secret. One that was
  // lost is made anew, over the next transport where nothing had come by it.
  struct Lane {
    std::shared_ptr<transport::Connection> connection;
    std::uint64_t number = 0;
    std::shared_ptr<Gate> gate;  // where there is a secret
    // Runs what sends over it, at once or when the worker has proved itself.
    template <class F>
    void pass(F send) const {
      if (gate) return gate->pass(Task(std::move(send)));
      send();
    }
  };
  Lane lane(const transport::Routes& routes);
  // Whether anything has come by that one.
  bool has_heard_by(std::uint64_t lane) const { return heard_by_ == lane; }
  // Of a worker that has not joined: asks for a sign of life, which comes as the answer to a call
  // of that number.
  void knock(const Lane& lane, std::uint64_t call);
  // The one that stands; without a connection where none does.
  Lane standing_lane() const;
  const WorkerInfo& worker() const { return entry_.worker; }
  Generation generation() const { return entry_.generation; }
  const Member& member() const { return entry_; }
  // Where tensors go that are sent to it: in calls, and back along its own calls to here.
  const DeviceMap& map() const { return map_; }
  const DeviceMap& map_back() const { return map_back_; }
  trace::Depth& in_flight() const { return in_flight_; }
  const std::shared_ptr<InFlight>& unanswered() const { return unanswered_; }
  const std::shared_ptr<BytesInFlight>& bytes() const { return bytes_; }  // of the same calls
  // Gives the number of the lane that has ended so; 0 where there was none.
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
  std::atomic<std::uint64_t> heard_by_{0};  // the last lane by which something has come
  mutable std::mutex mutex_;
  Lane lane_;
  transport::Routes::Failed failed_;  // transports whose lane has ended before anything came by it
  std::optional<Error> closed_;       // why no lane is made any more
};

// The rank, in a Hello, of a process that has not joined and asks a worker for a sign of life.
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
  // Who is at the other end; rank -1 until it has said so.
  WorkerInfo worker() const;
  Generation generation() const;

  // Answers a call. What packing throws, and what cannot be sent, is answered by a failure.
  // `kind` is what the frame counts as for Faults.
  void reply(std::uint64_t call, MessageKind kind, const Function& function, const CallState& state,
             const std::function<void(codec::Packer&)>& pack) noexcept;
  void fail(std::uint64_t call, MessageKind kind, Failure what, const Error& error) noexcept;
  // The program's function that has run for longest; null where none runs.
  std::shared_ptr<const CallState> longest_running() const;
  // The call of that number, while it runs here; else null.
  std::shared_ptr<const CallState> call(std::uint64_t number) const;
  // The caller could not read that reply: the references in it end.
  void take_back(std::uint64_t call);
  // The references in replies that may not have come.
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
  // `undo`: what was recorded of it, if it has not gone.
  void watch(const Op& op, std::uint64_t call, const std::function<void()>& undo);
  // That reply has not been sent, and why.
  void reply_refused(std::uint64_t call, MessageKind kind, const Error& why);
  void check_unchanged(const Function& function, const codec::SentBytes& sent) const;
  // Remembers the references in a reply until they are known to have come, or not.
  void keep_given(std::uint64_t call, const std::shared_ptr<SentReferences>& references);
  void forget(std::uint64_t call, std::uint64_t bytes, const Error* error = nullptr);
  // Where results go: the inverse of the caller's map. Throws Caller where the caller has left.
  std::shared_ptr<const DeviceMap> map_of_results(AgentCore& core);

  const std::weak_ptr<AgentCore> core_;
  const std::shared_ptr<transport::Connection> connection_;
  // On the loop, before the peer is known.
  struct Nonces {
    Nonce of_connector;
    Nonce of_listener;
  };
  std::optional<Nonces> nonces_;  // once it has asked
  bool proven_ = false;           // it knows the secret
  std::shared_ptr<Callers::Counts>
      counts_;  // once the peer is known; set on the loop, where it is asked for each message
  std::atomic<bool> closed_{false};  // what has not been read by then is dropped
  std::atomic<int> unsent_{0};       // failures that wait for room on the lane
  mutable std::mutex mutex_;
  std::optional<WorkerInfo> worker_;
  EventLoop::Registration greeting_;  // until then
  Generation generation_ = 0;
  // Of a lane for host memory that of a caller whose map has no GPUs; else known once it is needed.
  std::shared_ptr<const DeviceMap> map_;
  std::unordered_map<std::uint64_t, std::shared_ptr<CallState>> calls_;       // that run here
  std::unordered_map<std::uint64_t, std::shared_ptr<SentReferences>> given_;  // by call
  std::size_t prune_at_ = 64;                                                 // of those
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
