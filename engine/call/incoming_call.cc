// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <map>

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/future/when_all.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/trace.h>

namespace weft::call {

namespace traced {
namespace {
// A called function, on the thread that runs it.
constinit trace::Name run{trace::Layer::Engine, "run"};
}  // namespace
}  // namespace traced

CallExecutionContext::CallExecutionContext(std::shared_ptr<AgentCore> core,
                                           std::shared_ptr<const CallState> call)
    : core_(std::move(core)),
      agent_(detail::CoreCalls::handle(core_)),
      executor_(core_->thread_pool()),
      call_(std::move(call)) {}

CallExecutionContext::~CallExecutionContext() = default;

namespace {

const CallExecutionContext* call_of_this_thread() {
  const weft::detail::ExecutionContext* execution_context = weft::detail::execution_context().get();
  while (execution_context != nullptr) {
    if (const auto* call = dynamic_cast<const CallExecutionContext*>(execution_context))
      return call;
    execution_context = execution_context->around();
  }
  return nullptr;
}

}  // namespace

bool serves_call() { return call_of_this_thread() != nullptr; }

const CallExecutionContext& current_call(const char* what) {
  if (const auto* call = call_of_this_thread()) return *call;
  throw Error(Blame::Caller,
              std::string(what) +
                  " works inside a called function only; elsewhere use the agent that you made");
}

void start_function(const std::shared_ptr<AgentCore>& core, std::shared_ptr<const CallState> call,
                    bool on_loop, Task task, std::function<void(const Error& why)> refuse,
                    std::shared_ptr<IncomingCall> served) {
  auto execution_context = std::make_shared<CallExecutionContext>(core, std::move(call));
  Task run([execution_context = std::move(execution_context), task = std::move(task),
            served = std::move(served)]() mutable {
    if (served && ThreadPool::has_waited() && served->drop_if_late()) return;
    AgentCore& agent = *execution_context->core();
    execution_context->call().begun_at.store(coarse_now().time_since_epoch().count(),
                                             std::memory_order_relaxed);
    execution_context->call().has_begun.store(true, std::memory_order_release);
    agent.incoming_calls().function_started();
    {
      const weft::detail::ExecutionContextScope scope(execution_context);
      // Grad mode is on at first, and a function that changes it changes it for no later call.
      const c10::AutoGradMode recording(true);
      const c10::MultiStreamGuard streams(execution_context->call().streams);
      const tensor::ContextGuard context(agent.devices().cuda(), execution_context->call().streams);
      const trace::Range range(traced::run, {.rank = agent.self().rank});
      const trace::ServeScope counted;
      execution_context->call().traced.runs_here();
      task();
      task = Task();
    }
    agent.incoming_calls().function_ended();
  });
  if (!on_loop) return core->thread_pool()->run_call(std::move(run), std::move(refuse));
  if (core->loop()->inside()) return run();
  core->loop()->post(std::move(run));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError& caught) {
    // The places where the calls behind it were made are of no use here.
    return static_cast<const Error&>(caught).text();
  } catch (const Error& caught) {
    return caught.what();
  } catch (const std::exception& caught) {
    // The caller cannot throw exception types again that only the program knows. Their names tell
    // them apart.
    const std::string type = spelled(typeid(caught));
    const bool is_common =
        type.starts_with("std::") || type.starts_with("c10::") || type.starts_with("torch::");
    return (is_common ? "" : type + ": ") + tensor::text_of(caught);
  } catch (...) {
    return weft::text_of(error);
  }
}

void log_thrown(const Function& function, const WorkerInfo& caller, const std::string& text) {
  constexpr unsigned kAll = 5;
  static Mutex mutex;
  // Never destroyed: agents may outlive static objects.
  static auto* const times WEFT_POINTEE_GUARDED_BY(mutex) = new std::map<const Function*, unsigned>;
  unsigned count = 0;
  {
    MutexLock lock(mutex);
    count = ++(*times)[&function];
  }
  if (count > kAll && !std::has_single_bit(count)) return;
  log::warn(function.name + ", called by " + describe(caller) + ", threw: " + text +
            (count == kAll  ? " (from now on not every time is logged)"
             : count > kAll ? " (" + std::to_string(count) + " times so far)"
                            : ""));
}

void IncomingCall::give_up(const std::exception_ptr& error) noexcept {
  if (refused_) refused_(error);
  refuse(error);
}

void IncomingCall::run(Task task) {
  ThreadPool::Refuse refuse;  // empty on the loop, where the function needs no thread
  if (!on_loop_)
    refuse = [self = shared_from_this()](const Error& why) {
      self->give_up(std::make_exception_ptr(why));
    };
  start_function(core_, state_, on_loop_, std::move(task), std::move(refuse),
                 state_->expires && !on_loop_ ? shared_from_this() : nullptr);
}

// Late by the caller's time limit, counted from the call's arrival: how long the call was on its
// way is not known here, because clocks differ. The caller has given the call up by then.
bool IncomingCall::drop_if_late() noexcept {
  if (!state_->deadline.passed()) return false;
  give_up(std::make_exception_ptr(Error(
      Blame::Timeout, "its time limit passed before it got a thread there, so it was not run")));
  return true;
}

void IncomingCall::start(const std::optional<Future<void>>& first, Task task) {
  std::vector<Future<void>> unconfirmed;
  if (auto* references = codec::Reader::current().references())
    unconfirmed = static_cast<ReceivedReferences*>(references)->take_unconfirmed();
  // From now on only the arguments refer to their memory: the function may begin before this turn
  // ends, and may take the memory over.
  codec::Reader::current().tensors() = codec::TensorReader({});
  if (unconfirmed.empty() && (!first || (first->done() && !first->failed()))) {
    return run(std::move(task));
  }
  auto shared = std::make_shared<Task>(std::move(task));
  const auto go = [self = shared_from_this(), shared] { self->run(std::move(*shared)); };
  when_all(std::move(unconfirmed))
      .on_done_light([self = shared_from_this(), first, go](const Future<void>& confirmed) {
        if (const auto error = confirmed.error()) return self->give_up(error);
        if (!first) return go();
        first->on_done_light([self, go](const Future<void>& created) {
          if (const auto error = created.error()) return self->give_up(error);
          go();
        });
      });
}

}  // namespace weft::call
