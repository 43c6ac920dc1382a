// SPDX-License-Identifier: Apache-2.0
// The outgoing calls of one agent that wait for their replies: enters them, counts them, and
// completes each of them once, with a result, an error, or because its time is over.
//
// Owned by the agent's outgoing calls. Usable from every thread; nothing here blocks. Completing a
// call may run its continuations, so no lock is held then.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/expired_calls.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/pending.h>

namespace weft::call {

class AgentCore;

class WaitingCalls {
 public:
  explicit WaitingCalls(AgentCore& core) : core_(core) {}

  // How a call leaves this worker.
  struct Leaving {
    std::uint64_t connection_number = 0;  // 0 for a call to this worker itself
    std::uint64_t bytes = 0;              // of the message
    trace::Depth& in_flight;              // calls to that worker
    Slot slot = {};                       // one place among them, if calls are limited
    HeldBytes held = {};                  // its bytes, if bytes are limited
    std::shared_ptr<CallContext> context = {};
    std::shared_ptr<SentReferences> references = {};
    std::shared_ptr<CallState> here = {};  // set for a call to this worker itself
  };
  void add(std::uint64_t id, const Function& function, const CallOptions& options,
           Deadline deadline, std::unique_ptr<PendingCall> pending, Leaving leaving);

  // --- the end of one call; nothing happens if it waits no longer
  // Removes the call for a reply, if the call went to that worker by that connection. The caller
  // completes it. `pending` is null if the call is gone.
  WaitingCall take_of(std::uint64_t id, int rank, std::uint64_t connection_number) {
    return table_.take_of(id, rank, connection_number);
  }
  // Completes a call that was taken, and returns it.
  WaitingCall complete(WaitingCall call, const std::function<void(PendingCall&)>& how);
  // Completes a call to this worker itself; with Timeout if its deadline has passed.
  void complete_here(std::uint64_t id, const std::function<void(PendingCall&)>& how);
  void fail(std::uint64_t id, const Error& why);
  // The context in which the call is recorded forgets it.
  void forget_recorded(std::uint64_t id, const WaitingCall& call) const;

  // --- the end of many
  using Why = std::function<Error(const WaitingCall&)>;
  std::vector<PendingCalls::Taken> fail_all_of(int rank, std::uint64_t connection_number,
                                               const Why& why);
  void fail_all(const Why& why) { fail(table_.take_all(), why); }
  // For an agent that has been closed: no timer is set any more.
  [[nodiscard]] EventLoop::Registration take_timer();

  // --- the state of the calls
  // Notes the callee's reason why that call waits.
  void note(std::uint64_t call, int callee, const std::string& why);
  std::optional<AwaitedCall> longest_awaited(const std::vector<EventLoop::Wait>& waiting) const {
    return table_.longest_awaited(waiting);
  }
  bool waits(std::uint64_t id) const { return table_.waits(id); }
  ExpiredCalls& expired() { return expired_; }
  // The number of calls that wait, and of all calls so far; except those of a shutdown.
  std::uint64_t count() const { return waiting_; }
  std::uint64_t issued() const { return issued_; }
  // Counts a message that is to be sent again as a call that waits, for graceful shutdown.
  void hold(int change) { waiting_ += static_cast<std::uint64_t>(change); }

 private:
  std::vector<PendingCalls::Taken> fail(std::vector<PendingCalls::Taken> calls, const Why& why);
  void arm(Deadline deadline);
  void expire();

  AgentCore& core_;
  PendingCalls table_;
  ExpiredCalls expired_;
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<std::uint64_t> waiting_{0};
  // When the timer fires.
  std::atomic<Deadline::Clock::time_point> armed_{Deadline::Clock::time_point::max()};
  Mutex mutex_;
  EventLoop::Registration timer_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
