// SPDX-License-Identifier: Apache-2.0
// The extension point of calls. References (engine/rref) and distributed autograd (engine/autograd)
// are built on calls: they plug in here, and nothing in engine/call knows them otherwise. The
// facade (engine/rpc) gives an agent one extension of each kind when it makes the agent.
//
// Functions are called on any thread and without a lock of the agent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/codec/tensors.h>
#include <weft/engine/future/future.h>

namespace weft::call {

class Extension {
 public:
  Extension() = default;
  Extension(const Extension&) = delete;
  Extension& operator=(const Extension&) = delete;
  virtual ~Extension() = default;

  // The worker cannot be reached any more, and everything that it held ends. With `successor`, it
  // has left, and the worker of that generation has its rank now.
  virtual void worker_lost(int rank, std::optional<std::uint16_t> successor) = 0;
  // Whether the extension keeps anything for that worker, or waits for it.
  virtual bool concerns(int rank) const = 0;
  // The agent leaves, and everything that the extension keeps ends. Called again once the agent's
  // threads have ended.
  virtual void close() = 0;
  // Fills in the extension's own counts.
  virtual void count(DebugInfo& info) const = 0;
};

// The references in one message to a worker.
class SentReferences : public codec::ReferenceWriter {
 public:
  // The message will not be sent, or could not be read: the references made for it end.
  virtual void undo() = 0;
  // Call it only before another thread uses this object.
  virtual bool is_empty() const = 0;
  // Whether all its references have ended.
  virtual bool is_over() const = 0;
};

// The references in one message from a worker.
class ReceivedReferences : public codec::ReferenceReader {
 public:
  // Futures that are done when the owners know the references that the message brought. The
  // function of a call starts after them.
  virtual std::vector<Future<void>> take_unconfirmed() = 0;
};

class ReferenceExtension : public Extension {
 public:
  virtual std::shared_ptr<SentReferences> references_to(const Recipient& worker) = 0;
  // Calls `read` with the references of a message from that worker, which live until it returns.
  virtual void with_references_from(int worker,
                                    const std::function<void(ReceivedReferences&)>& read) = 0;
  // A connection to the worker, or from it, has ended: asks the worker which of the references in
  // these messages it has received. The others end.
  virtual void ask_which_arrived(int worker,
                                 const std::vector<std::shared_ptr<SentReferences>>& sent) = 0;
  // This worker could not read the reply to that call: tells the callee, where its references end.
  virtual void give_back_reply(int callee, std::uint64_t call) = 0;
  // The references that this worker holds, one text each, with where they came from.
  virtual std::vector<std::string> held() const = 0;
};

// The context in which a call is made. Its id travels with the call. Usable from every thread.
class CallContext {
 public:
  CallContext() = default;
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;
  virtual ~CallContext() = default;
  virtual std::uint64_t id() const = 0;
  virtual bool released() const = 0;
  // A message with these tensors, which require gradients, is about to be sent to that worker.
  virtual void sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors) = 0;
  // Attaches gradients to the tensors of a message that has arrived.
  virtual codec::AttachGradient receiver(const MessageId& message, const WorkerInfo& from) = 0;
  // The message was not sent, or its call failed.
  virtual void forget(const MessageId& message) = 0;
};

class ContextExtension : public Extension {
 public:
  // The context of this thread, if it is one of this agent's; else null.
  virtual std::shared_ptr<CallContext> current() const = 0;
  // Whether calls that this thread makes are recorded in its context.
  virtual bool records_calls() const = 0;
  // A call made in that context has arrived from that worker. Null where the context has ended.
  virtual std::shared_ptr<CallContext> arrived(std::uint64_t context, int from) = 0;
  // The receiver of that message could not read it: the context in which it is recorded forgets it.
  virtual void forget(const MessageId& message) = 0;
  // Tells the worker that the context has ended.
  virtual void tell_ended(int worker, std::uint64_t context) = 0;
  // The result of a call outside of any context requires gradients and has been computed from
  // tensors that do: a backward through it ends there.
  virtual void note_computed(const at::Tensor& result, const std::string& worker,
                             const std::string& function) const = 0;
  // Whether a tensor has been computed from others that require gradients.
  using IsComputed = bool (*)(const at::Tensor& tensor);
  virtual IsComputed is_computed() const = 0;
};

}  // namespace weft::call
