// SPDX-License-Identifier: Apache-2.0
// One incoming call: starts the function when it may run, and sends its result.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include <weft/base/error.h>
#include <weft/base/export.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/function.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/future/executor.h>
#include <weft/profiling/trace/operation.h>

namespace weft::rpc {
class Agent;
}

namespace weft::call {

using rpc::Agent;
class AgentCore;

// The state that this_call() shows. Shared with everything that may cancel the call.
struct CallState {
  WorkerInfo caller;
  const Function* function = nullptr;
  Generation generation = 0;  // the caller's
  WorkerGeneration worker_generation() const {
    return {caller.rank, static_cast<std::uint16_t>(generation)};
  }
  Deadline deadline = Deadline::never();
  std::atomic<bool> cancelled{false};
  mutable std::atomic<bool> has_begun{false};             // its function has begun …
  mutable std::atomic<Deadline::Clock::rep> begun_at{0};  // … at this time, which is set first
  std::shared_ptr<CallContext> context;  // in which the call was made; null for none
  // Made under NoGradGuard: neither its result nor the calls that its function makes are recorded.
  bool no_grad = false;
  // One stream of each GPU in use; they are current while the function runs.
  std::vector<c10::Stream> streams;
  trace::Operation traced{};  // ended by the code that takes the call from Inbound's table
  // Its function is a user's, and does not begin after the deadline if it had to wait for a thread.
  bool expires = false;
};

// Accompanies a call's function and its continuations: the agent and the call.
class CallExecutionContext final : public weft::detail::ExecutionContext {
 public:
  CallExecutionContext(std::shared_ptr<AgentCore> core, std::shared_ptr<const CallState> call);
  ~CallExecutionContext() override;
  const std::shared_ptr<weft::detail::Executor>& executor() const override { return executor_; }
  const std::shared_ptr<AgentCore>& core() const { return core_; }
  const CallState& call() const { return *call_; }
  Agent& agent() const { return *agent_; }

 private:
  std::shared_ptr<AgentCore> core_;
  std::shared_ptr<Agent> agent_;  // returned by this_agent()
  std::shared_ptr<weft::detail::Executor> executor_;
  std::shared_ptr<const CallState> call_;
};

// This thread's call. Throws Caller outside of one; `what` names the asking function in the error.
WEFT_API const CallExecutionContext& current_call(const char* what);

// Whether this thread runs a function for a call, or one of its continuations or coroutines.
bool serves_call();

class IncomingCall;

// Runs a call's function in its execution context and counts it as running: on the loop if
// `on_loop`, else on the thread pool. If the pool has no thread for it, `refuse` runs instead. A
// call with `served` that waited for a thread behind others is refused if its time limit, counted
// from its arrival, has passed. A call that found a thread free is run in any case.
WEFT_API void start_function(const std::shared_ptr<AgentCore>& core,
                             std::shared_ptr<const CallState> call, bool on_loop, Task task,
                             std::function<void(const Error& why)> refuse,
                             std::shared_ptr<IncomingCall> served = nullptr);

// The text of an exception that a function threw, without libtorch's stack traces.
WEFT_API std::string text_of(const std::exception_ptr& error);

// Warns that a function threw: for each function the first five times, then ever more rarely.
void log_thrown(const Function& function, const WorkerInfo& caller, const std::string& text);

// A call from another worker. Exactly one of reply(), fail() and refuse() ends it.
class WEFT_API IncomingCall : public std::enable_shared_from_this<IncomingCall> {
 public:
  IncomingCall(std::shared_ptr<AgentCore> core, const Function& function, bool on_loop,
               std::shared_ptr<CallState> state)
      : core_(std::move(core)), function_(function), on_loop_(on_loop), state_(std::move(state)) {}
  IncomingCall(const IncomingCall&) = delete;
  IncomingCall& operator=(const IncomingCall&) = delete;
  virtual ~IncomingCall() = default;

  const std::shared_ptr<AgentCore>& core() const { return core_; }
  const Function& function() const { return function_; }
  const CallState& state() const { return *state_; }
  // `refused` runs if the call ends without its function having run, before the caller is told.
  void on_refused(std::function<void(const std::exception_ptr&)> refused) {
    refused_ = std::move(refused);
  }
  // Called when the arguments have been decoded. Runs the task, which runs the function, once the
  // references in the arguments are confirmed and `first` is done (the creation of the value that a
  // method is called on).
  void start(const std::optional<Future<void>>& first, Task task);

  // Ends the call if its time is over before its function has begun. False if it is not over.
  bool drop_if_late() noexcept;

  // Packs and sends the result. An error of packing becomes the failure.
  virtual void reply(const std::function<void(codec::Packer&)>& pack) noexcept = 0;
  // The function threw.
  virtual void fail(const std::exception_ptr& error) noexcept = 0;
  // The function was not run.
  virtual void refuse(const std::exception_ptr& error) noexcept = 0;

 protected:
  const std::shared_ptr<AgentCore> core_;
  const Function& function_;
  const bool on_loop_;
  const std::shared_ptr<CallState> state_;

 private:
  void give_up(const std::exception_ptr& error) noexcept;
  void run(Task task);
  std::function<void(const std::exception_ptr&)> refused_;
};

}  // namespace weft::call
