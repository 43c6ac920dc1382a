// SPDX-License-Identifier: Apache-2.0
// One connection from another worker: carries its calls here and the replies back. peer.h
// describes the first messages of the connecting side.
//
// Owned by the agent's connections until the connection has ended. Usable from every thread;
// messages arrive on the loop. Nothing here blocks, except that the first reply with devices may
// look the caller up in the store.
//
// It has 28 functions, because every step from the first message to the last answer changes the
// same table of calls, under one mutex.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>

#include <weft/base/mutex.h>
#include <weft/engine/call/device_maps.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/wire_records.h>
#include <weft/transport/challenge.h>

namespace weft::call {

class AgentCore;

class Inbound : public std::enable_shared_from_this<Inbound> {
 public:
  Inbound(std::weak_ptr<AgentCore> core, std::shared_ptr<transport::Connection> connection,
          bool carries_devices)
      : core_(std::move(core)),
        connection_(std::move(connection)),
        map_(carries_devices ? nullptr : std::make_shared<const DeviceMap>()) {}
  void start();
  void close(const Error& why) noexcept;
  // Refuses a worker that has sent no hello.
  void turn_away(const std::string& why);
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
  void challenged(const AgentCore& core, const transport::Arrival& arrival);
  Error refused(const AgentCore& core, const std::string& wrong) const;
  void refuse(const AgentCore& core, const std::string& wrong);
  void deliver(const std::shared_ptr<AgentCore>& core, Message message, const Error* lacking);
  void greeted(const std::shared_ptr<AgentCore>& core, const Message& message);
  void answer_knock(std::uint64_t call);
  void call_arrived(const std::shared_ptr<AgentCore>& core, Message message, const Error* lacking);
  // Notes that the call runs here. False if another call has its number.
  bool enter(const AgentCore& core, const Message& message,
             const std::shared_ptr<CallState>& state);
  void ended(const Error& why);
  void send_failure(AgentCore& core, std::uint64_t call, MessageKind kind, Failure what,
                    const Error& error) noexcept;
  void send_failure_of(const Head& head, const std::shared_ptr<const FailureRecord>& record);
  // Watches the sending of a reply. `undo` undoes the records of it if it is not sent.
  void watch(const Op& op, std::uint64_t call, const std::function<void()>& undo);
  // Tells the caller that its reply was not sent, and why.
  void reply_refused(std::uint64_t call, MessageKind kind, const Error& why);
  // Remembers the references in a reply until it is known whether they have arrived.
  void keep_given(std::uint64_t call, const std::shared_ptr<SentReferences>& references);
  void forget(std::uint64_t call, std::uint64_t bytes, const Error* error = nullptr);
  // The map for results: the inverse of the caller's map. Throws NotThere if the caller has left.
  std::shared_ptr<const DeviceMap> map_of_results(AgentCore& core);

  const std::weak_ptr<AgentCore> core_;
  const std::shared_ptr<transport::Connection> connection_;
  // Set if the workers have a secret. Used on the loop only.
  std::optional<transport::Challenge> challenge_;
  // Set when the peer is known. Used on the loop only, for each message.
  std::shared_ptr<Callers::Counts> counts_;
  std::atomic<bool> closed_{false};  // messages that have not been read by then are dropped
  std::atomic<int> unsent_{0};       // failures that wait for room on the connection
  mutable Mutex mutex_;
  // The worker and its generation change once, on the loop and under the mutex. The loop may read
  // them without it.
  std::optional<WorkerInfo> worker_;
  Generation generation_ = 0;
  // The time limit for the Hello, until it has come.
  EventLoop::Registration greeting_ WEFT_GUARDED_BY(mutex_);
  // For a connection without device memory, the map of a caller whose map has no GPUs; otherwise
  // set when it is first needed.
  std::shared_ptr<const DeviceMap> map_ WEFT_GUARDED_BY(mutex_);
  // The calls that run here.
  std::unordered_map<std::uint64_t, std::shared_ptr<CallState>> calls_ WEFT_GUARDED_BY(mutex_);
  // By call.
  std::unordered_map<std::uint64_t, std::shared_ptr<SentReferences>> given_ WEFT_GUARDED_BY(mutex_);
  // Size of given_ at which it is pruned.
  std::size_t prune_at_ WEFT_GUARDED_BY(mutex_) = 64;
};

}  // namespace weft::call
