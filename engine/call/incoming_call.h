// One call that this worker was asked for: it starts the function where it may run, and sends its
// result.
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
class AgentCore;

// What this_call() shows; shared with whoever may cancel it.
struct CallState {
  WorkerInfo caller;
  const Function* function = nullptr;
  Generation generation = 0;  // the caller's
  WorkerGeneration worker_generation() const {
    return {caller.rank, static_cast<std::uint16_t>(generation)};
  }
  Deadline deadline = Deadline::never();
  std::atomic<bool> cancelled{false};
  mutable std::atomic<bool> has_begun{false};             // its function …
  mutable std::atomic<Deadline::Clock::rep> begun_at{0};  // … at this time, set before
  std::shared_ptr<CallContext> context;  // that the call was made in; null for none
  bool no_grad = false;  // made under NoGradGuard: nothing behind it is recorded in a context
  std::vector<c10::Stream>
      streams;                // that are current while the function runs, one of each GPU in use
  trace::Operation traced{};  // whoever takes the call from Inbound's table ends it
  bool expires =
      false;  // its function is a user's: not begun behind the deadline, if it had to wait
};

// What follows a call through continuations: the agent and the call.
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
  std::shared_ptr<Agent> agent_;  // what this_agent() gives
  std::shared_ptr<weft::detail::Executor> executor_;
  std::shared_ptr<const CallState> call_;
};

// This thread's call. Throws Caller outside of one, with `what` as the reason for asking.
WEFT_API const CallExecutionContext& current_call(const char* what);

// Whether this thread runs a function for a call, or goes on with one: its continuations, its
// coroutines.
bool serves_call();

class IncomingCall;

// Runs a call's function: in its execution context, counted, on the loop if it may and this is the
// loop, else on the thread pool. Where that has no thread for it, `refuse` runs instead. A call
// that `served` has to answer, and that waited for a thread behind others until its time limit had
// passed since it came, is refused; one that found a thread free is run, whatever its limit.
WEFT_API void start_function(const std::shared_ptr<AgentCore>& core,
                             std::shared_ptr<const CallState> call, bool on_loop, Task task,
                             std::function<void(const Error& why)> refuse,
                             std::shared_ptr<IncomingCall> served = nullptr);

// what() of whatever a function threw, without libtorch's stack traces.
WEFT_API std::string text_of(const std::exception_ptr& error);

// Warns of what a function threw. Of each function the first five times, then ever more rarely.
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
  // Runs, before the caller is told, where the call ends without its function having run.
  void on_refused(std::function<void(const std::exception_ptr&)> refused) {
    refused_ = std::move(refused);
  }
  // When the arguments have been decoded, with what runs the function: that is once their
  // references are confirmed, and `first` is done (the creation of the value that a method is
  // called on).
  void start(const std::optional<Future<void>>& first, Task task);

  // Ends a call whose time is over before its function has begun; false where it is not.
  bool drop_if_late() noexcept;

  // Packs and sends the result. What packing throws becomes the failure.
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

}  // namespace weft::rpc
