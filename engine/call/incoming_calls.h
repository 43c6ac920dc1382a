// SPDX-License-Identifier: Apache-2.0
// The calls that one agent serves: counts of them, and their states for the workers that ask. The
// calls themselves belong to the connections that they came by (inbound.h). Owned by AgentCore.
// Usable from every thread; nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/incoming_call.h>

namespace weft::call {

class AgentCore;

class IncomingCalls {
 public:
  explicit IncomingCalls(AgentCore& core) : core_(core) {}

  Callers& callers() { return callers_; }
  void count_served() { ++served_; }
  std::uint64_t served() const { return served_; }
  void count_replies(int change) { replies_ += change; }  // replies on their way
  int replies() const { return replies_; }
  void function_started() { ++running_; }
  void function_ended() { --running_; }
  std::uint64_t running() const { return running_; }

  // Watches a call that waits for a thread: tells its caller if it still waits when half of the
  // time left to it is over.
  void watch_for_thread(std::shared_ptr<const CallState> state, std::uint64_t call);
  // Describes the state here of a call from that caller, as the end of "which …". Empty if this
  // worker does not know the call.
  std::string progress_of(int caller, std::uint64_t call, bool is_fetch) const;
  // The same for a call whose state is known; it may be this worker's own.
  std::string progress(const CallState& call, bool is_fetch) const;
  // Describes the work that keeps this worker from shutdown(), as far as it is known: "runs f for
  // worker1 (rank 1)", "waits for g on …".
  std::string doing() const;
  // The caller could not read its reply: the references in it end.
  void take_back_reply(int caller, std::uint64_t call);

 private:
  void tell_of_wait(const CallState& state, std::uint64_t call);

  AgentCore& core_;
  Callers callers_;
  std::atomic<std::uint64_t> served_{0};
  std::atomic<int> replies_{0};
  std::atomic<int> watched_{0};  // calls watched by watch_for_thread()
  std::atomic<std::uint64_t> running_{0};
};

}  // namespace weft::call
