// SPDX-License-Identifier: Apache-2.0
#include <weft/base/log.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rpc/agent.h>
#include <weft/engine/rref/control.h>
#include <weft/profiling/trace/dump.h>

namespace weft::call::detail {

const std::shared_ptr<AgentCore>& CoreCalls::of(const Agent& agent) {
  static_cast<void>(agent.self());  // throws if there is no agent
  return agent.shared_core();
}

std::shared_ptr<Agent> CoreCalls::handle(const std::shared_ptr<AgentCore>& core) {
  return std::make_shared<Agent>(core, false);
}

}  // namespace weft::call::detail

namespace weft::rpc {

using call::AgentCore;
using call::CallOptions;

Agent::Agent(std::shared_ptr<AgentCore> core, bool leaves_when_dropped) : core_(std::move(core)) {
  if (!leaves_when_dropped) return;
  leave_when_dropped_ =
      std::shared_ptr<const void>(core_.get(), [kept = core_](const void*) { kept->leave(); });
}

AgentCore& Agent::core() const {
  if (!core_)
    throw Error(Blame::Caller, "this rpc::Agent was default-constructed; make one with rpc::init");
  core_->lifetime().require_own();
  return *core_;
}

Future<at::Tensor> Agent::issue_op(const std::string& name, const Destination& to,
                                   std::vector<OperatorValue> arguments) const {
  return issue<&run_operator>(to, name, std::move(arguments));
}
RRef<at::Tensor> Agent::create_op(const std::string& name, const Destination& to,
                                  std::vector<OperatorValue> arguments) const {
  return remote<&run_operator>(to, name, std::move(arguments));
}
CallOptions Agent::call_options(const Destination& to, bool on_loop) const {
  CallOptions options = call::detail::CoreCalls::call_options(core(), to);
  options.on_loop = on_loop;
  return options;
}

WorkerInfo Agent::worker(const Destination& who) const {
  return core().directory().find(core().outgoing_calls().recipient(who)).worker;
}
std::vector<WorkerInfo> Agent::workers() const { return core().directory().workers(); }
const WorkerInfo& Agent::self() const { return core().self(); }
bool Agent::alive(const Destination& worker) const { return core().members().alive(worker); }
void Agent::on_worker_lost(std::function<void(const WorkerInfo&, const Error&)> callback) const {
  core().members().on_lost(std::move(callback));
}
void Agent::on_worker_joined(std::function<void(const WorkerInfo&)> callback) const {
  core().members().on_joined(std::move(callback));
}
std::string Agent::transport_to(const Destination& worker) const {
  return core().connections().transport_to(core().outgoing_calls().recipient(worker).rank);
}
void Agent::set_timeout(std::chrono::milliseconds limit) {
  core().outgoing_calls().set_timeout(limit);
}
std::chrono::milliseconds Agent::timeout() const { return core().outgoing_calls().timeout(); }
void Agent::shutdown(const Graceful& options) { core().shutdown().run(options); }
void Agent::leave() {
  if (core_ && core_->lifetime().is_inherited()) return core_->leave();
  core().leave();
}
DebugInfo Agent::debug_info() const { return core().debug_info(); }
std::string Agent::dump() const { return trace::dump("asked for by " + describe(self())); }

Agent& this_agent() { return call::current_call("rpc::this_agent()").agent(); }

CallInfo this_call() {
  const call::CallState& call = call::current_call("rpc::this_call()").call();
  return {call.caller, call.deadline, call.cancelled || call.deadline.passed()};
}

}  // namespace weft::rpc
