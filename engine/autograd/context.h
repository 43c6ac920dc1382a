// SPDX-License-Identifier: Apache-2.0
// One worker's part of one autograd context. Its parts are the recording (messages and workers),
// the failed passes that some worker may not know of, and the passes with their gradients.
//
// Owned by the agent's contexts until it is released; passes, calls and users' handles share it.
// Usable from every thread; nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <weft/engine/autograd/failed_passes.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/autograd/passes.h>
#include <weft/engine/autograd/recording.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/codec/tensors.h>

namespace weft::call {
class AgentCore;
}

namespace weft::autograd {

// "(2, 17)".
std::string to_text(ContextId id);

// The outcome to send on for an error: its blame, and the error's text without the names of workers
// around it.
Outcome outcome_of(const std::exception_ptr& error);

class Context final : public call::CallContext, public std::enable_shared_from_this<Context> {
 public:
  // `steps`: the number of optimizer steps on this worker so far.
  Context(call::AgentCore& core, ContextId id, std::uint64_t steps = 0);
  ContextId id() const override { return id_; }
  std::shared_ptr<call::AgentCore> core() const;
  // The rank of the worker that made it.
  int owner() const { return owner_of(id_); }
  bool belongs_to(const call::AgentCore& core) const { return &core_ == &core; }

  Recording& recording() { return recording_; }
  FailedPasses& failed_passes() { return failed_passes_; }
  Passes& passes() { return passes_; }
  // Called when the worker has ended the context by itself, so it need not be told of anything.
  void remove_worker(int rank);

  // Records a message with these tensors to that worker; does nothing if there are none.
  void sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors) override {
    recording_.sent(message, to, tensors);
  }
  // Drops a message that was not sent or whose call failed: no gradient will come for it.
  void forget(const MessageId& message) override { recording_.forget(message); }
  // Attaches the tensors of an incoming message to a new RecvNode.
  codec::AttachGradient receiver(const MessageId& message, const rpc::WorkerInfo& from) override;

  // The outcome of a pass that has failed on this worker with `error`, at `where`.
  Outcome outcome(const std::exception_ptr& error, const std::string& where) const;

  bool released() const override { return released_; }
  // Drops everything; running passes fail with Cancelled.
  void release(const std::string& why);

 private:
  static int owner_of(ContextId id) { return static_cast<int>(id >> 48); }

  call::AgentCore& core_;
  const ContextId id_;
  const std::uint64_t steps_before_;  // before the context came here
  std::atomic<bool> released_{false};
  Recording recording_;
  FailedPasses failed_passes_;
  Passes passes_;
};

}  // namespace weft::autograd
