// SPDX-License-Identifier: Apache-2.0
// Options::faults: for tests, the faults that are injected into the messages that one agent sends.
// Owned by the agent's connections. Usable from every thread; nothing here blocks.
#pragma once

#include <functional>
#include <map>

#include <weft/base/mutex.h>
#include <weft/engine/call/types.h>

namespace weft::call {

class AgentCore;

class InjectedFaults {
 public:
  // `faults` must outlive this object.
  InjectedFaults(AgentCore& core, const Faults& faults) : core_(core), faults_(faults) {}

  // Runs `send`, or drops or delays it if the faults say so. False if a fault refuses the message,
  // as a connection would.
  bool pass(MessageKind kind, std::function<void()> send);

 private:
  bool refuses(MessageKind kind);
  void delay(MessageKind kind, std::chrono::milliseconds pause, std::function<void()> send);

  AgentCore& core_;
  const Faults& faults_;
  Mutex mutex_;
  // Messages refused so far.
  std::map<MessageKind, int> refused_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
