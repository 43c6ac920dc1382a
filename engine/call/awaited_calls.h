// SPDX-License-Identifier: Apache-2.0
// Reports of long waits: when a thread has waited long for the result of a call, this worker asks
// the callee how far the call is, and logs the answer on stderr. Each wait report is one line per
// worker, for the call that has been waited for longest.
//
// Owned by the agent's outgoing calls. longest() is usable from every thread; the rest is on the
// loop, and nothing here blocks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/engine/call/pending.h>

namespace weft::call {

class AgentCore;

class AwaitedCalls {
 public:
  explicit AwaitedCalls(AgentCore& core) : core_(core) {}

  // Looks for long waits, again and again, for as long as the agent is open.
  void look();
  // The call that a thread here has waited for longest, if that is at least so long.
  std::optional<AwaitedCall> longest(std::chrono::milliseconds at_least) const;

 private:
  void report();
  void ask_about(const AwaitedCall& call);
  void say(const AwaitedCall& call, const std::string& what_callee_does) const;

  AgentCore& core_;
  std::atomic<bool> asks_{false};  // the callee of a call to report is being asked
  std::size_t said_level_ = 0;     // the level of the last report, and its time
  Deadline::Clock::time_point said_at_{};
  EventLoop::Registration looks_;
};

}  // namespace weft::call
