// SPDX-License-Identifier: Apache-2.0
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>

namespace weft::call {

namespace detail {

std::exception_ptr thrown_by(AgentCore& core, const Function& function,
                             const std::exception_ptr& error) {
  return std::make_exception_ptr(RemoteError(core.self().name, function.name, text_of(error),
                                             to_error(error, Blame::Remote).ranks()));
}
DeviceWorkRef enqueued(AgentCore& core) {
  return core.devices().cuda().work(tensor::CudaDevices::current_streams(core.devices().gpus()));
}

const std::shared_ptr<ThreadPool>& CoreCalls::executor(AgentCore& core) {
  return core.thread_pool();
}
bool CoreCalls::closed(AgentCore& core) { return core.closed(); }
bool CoreCalls::is_self(AgentCore& core, int rank) { return core.self().rank == rank; }
int CoreCalls::self(AgentCore& core) { return core.self().rank; }
std::shared_ptr<const Member> CoreCalls::send_call(AgentCore& core, const Function& function,
                                                   const CallOptions& options,
                                                   const std::function<void(codec::Packer&)>& pack,
                                                   std::unique_ptr<PendingCall> pending) {
  return core.outgoing_calls().send(function, options, pack, std::move(pending));
}
void CoreCalls::call_here(AgentCore& core, const Function& function, const CallOptions& options,
                          const std::optional<Future<void>>& first,
                          std::unique_ptr<PendingCall> pending,
                          const std::function<Task(std::uint64_t)>& make) {
  core.outgoing_calls().call_here(function, options, first, std::move(pending), make);
}
void CoreCalls::complete_here(AgentCore& core, std::uint64_t id,
                              const std::function<void(PendingCall&)>& how) {
  core.outgoing_calls().waiting().complete_here(id, how);
}
void CoreCalls::fail_here(AgentCore& core, const Function& function, std::uint64_t id,
                          const std::exception_ptr& error) {
  log_thrown(function, core.self(), text_of(error));
  const auto thrown = thrown_by(core, function, error);
  core.outgoing_calls().waiting().complete_here(id, [&](PendingCall& call) { call.fail(thrown); });
}
void CoreCalls::hold_activity(AgentCore& core, int change) {
  core.outgoing_calls().waiting().hold(change);
}
std::uint64_t CoreCalls::after(AgentCore& core, std::chrono::milliseconds pause, Task task) {
  return core.pauses().after(pause, std::move(task));
}

void CoreCalls::drop_pause(const std::weak_ptr<AgentCore>& core, std::uint64_t number) {
  if (const auto held = core.lock()) held->pauses().drop(number);
}
void CoreCalls::off_loop(AgentCore& core, const Recipient& to, Task task) {
  core.connections().off_loop(to, std::move(task));
}
std::chrono::milliseconds CoreCalls::limit(AgentCore& core,
                                           std::optional<std::chrono::milliseconds> given) {
  return given && *given != kAgentTimeout ? usable_limit(*given, "a time limit")
                                          : core.outgoing_calls().timeout();
}
CallOptions CoreCalls::call_options(AgentCore& core, const Destination& to) {
  return {core.outgoing_calls().recipient(to), core.outgoing_calls().limit_of(to),
          MessageKind::Call, false, to.place()};
}
Member CoreCalls::member(AgentCore& core, const Recipient& worker) {
  return core.directory().find(worker);
}
std::chrono::milliseconds CoreCalls::time_left() {
  const CallState& call = current_call("time_left()").call();
  if (call.cancelled || call.deadline.passed())
    throw Error(Blame::Cancelled,
                "time_left(): the caller has withdrawn this call, or its time is over");
  return call.deadline.is_never() ? 0ms : std::max(1ms, call.deadline.remaining());
}
void CoreCalls::look_after(AgentCore& core, int rank) {
  core.liveness().look_after(rank, Liveness::Asked::ByTheWay);
}
void CoreCalls::depend_on(AgentCore& core, int rank, int change) {
  core.liveness().depend_on(rank, change);
}
void CoreCalls::heard_from(AgentCore& core, int rank) { core.liveness().heard_from(rank); }
bool CoreCalls::is_lost(AgentCore& core, int rank) { return core.liveness().is_lost(rank); }
std::shared_ptr<AgentCore> CoreCalls::current_core(const char* what) {
  return current_call(what).core();
}
}  // namespace detail

}  // namespace weft::call
