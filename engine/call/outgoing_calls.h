// SPDX-License-Identifier: Apache-2.0
// The calls that one agent makes: finds the worker, packs the arguments and sends them. Owned by
// AgentCore. Usable from every thread. send() blocks while it connects, and where the program's own
// threads wait for room for a call's bytes; recipient() blocks on the store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <weft/base/task.h>
#include <weft/engine/call/awaited_calls.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/peer.h>
#include <weft/engine/call/waiting_calls.h>

namespace weft::call {

class AgentCore;

// Converts a time limit that a caller gave: none (0) for kNoTimeout, and at most as long as a clock
// can hold. Throws Caller for a negative one; `what` names the limit in the error.
std::chrono::milliseconds usable_limit(std::chrono::milliseconds given, const std::string& what);

class OutgoingCalls {
 public:
  explicit OutgoingCalls(AgentCore& core);

  // Throws NotThere if the destination is not in the job, and Caller after shutdown.
  Recipient recipient(const Destination& destination);
  std::chrono::milliseconds limit_of(const Destination& destination) const;
  void set_timeout(std::chrono::milliseconds limit);
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }

  // Sends a call to another worker, and returns that worker. Throws the errors of packing; later
  // errors fail `pending`.
  std::shared_ptr<const Member> send(const Function& function, const CallOptions& options,
                                     const std::function<void(codec::Packer&)>& pack,
                                     std::unique_ptr<PendingCall> pending);
  // Makes a call to this worker itself. `make` returns the task that runs the function and then
  // completes `pending` by the call's id. If `first` is set, the task runs once that is done.
  void call_here(const Function& function, const CallOptions& options,
                 const std::optional<Future<void>>& first, std::unique_ptr<PendingCall> pending,
                 const std::function<Task(std::uint64_t id)>& make);
  std::uint64_t next_id();

  // The connection has ended: fails the calls that went by it, and returns the references in them.
  std::vector<std::shared_ptr<SentReferences>> connection_ended(const WorkerInfo& worker,
                                                                std::uint64_t connection_number,
                                                                const Error& why);
  // A connection that carried nothing but a knock has ended.
  void knock_ended(const WorkerInfo& worker, std::uint64_t connection_number, const Error& why);

  WaitingCalls& waiting() { return waiting_; }
  AwaitedCalls& awaited() { return awaited_; }
  std::size_t held_back() const { return held_back_; }

 private:
  struct Sending;  // a call on its way to the connection
  // The steps of send(), in their order.
  void pack(Sending& call, const std::function<void(codec::Packer&)>& pack) const;
  Peer::Numbered connect(const Sending& call);
  Head enter(Sending& call, const Peer::Numbered& connection, std::unique_ptr<PendingCall> pending);
  void post(const Sending& call, const Peer::Numbered& connection, const Head& head);

  // Takes room for the call's bytes. The program's own threads wait for room, at most as long as is
  // left of the call's time limit (0: none); the time that they waited is subtracted from it.
  // Throws Timeout.
  void hold_back(Sending& call);
  std::shared_ptr<CallContext> context_of(const CallOptions& options) const;
  // Fails the call if its arguments were changed while they were being sent.
  void check_unchanged(std::uint64_t call, const Function& function, const Peer& to,
                       const codec::SentBytes& sent);

  AgentCore& core_;
  trace::Depth& own_calls_;  // calls in flight to this worker itself
  std::atomic<std::chrono::milliseconds::rep> timeout_;
  std::atomic<std::uint64_t> next_{1};
  std::atomic<std::size_t> held_back_{0};
  WaitingCalls waiting_;
  AwaitedCalls awaited_;
};

}  // namespace weft::call
