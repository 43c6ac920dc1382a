#include <weft/base/log.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rpc/agent.h>
#include <weft/engine/rref/control.h>
#include <weft/profiling/trace/dump.h>

namespace weft::rpc {

namespace detail {

rref::References& references_of(AgentCore& core) { return core.references(); }
std::exception_ptr thrown_by(AgentCore& core, const Function& function,
                             const std::exception_ptr& error) {
  return std::make_exception_ptr(RemoteError(core.self().name, function.name, text_of(error),
                                             to_error(error, Blame::Remote).ranks()));
}
DeviceWorkRef enqueued(AgentCore& core) {
  return core.devices().work(tensor::CudaDevices::current_streams(core.gpus()));
}

namespace {
Issue issue_of(const Function& function, const Going& going) {
  return {function, going.to, going.limit, going.kind, going.on_loop, going.back};
}
}  // namespace

const std::shared_ptr<ThreadPool>& CoreCalls::executor(AgentCore& core) {
  return core.thread_pool();
}
bool CoreCalls::closed(AgentCore& core) { return core.closed(); }
bool CoreCalls::is_self(AgentCore& core, int rank) { return core.self().rank == rank; }
int CoreCalls::self(AgentCore& core) { return core.self().rank; }
std::shared_ptr<const Member> CoreCalls::send_call(AgentCore& core, const Function& function,
                                                   const Going& going,
                                                   const std::function<void(codec::Packer&)>& pack,
                                                   std::unique_ptr<PendingCall> pending) {
  return core.send_call(issue_of(function, going), pack, std::move(pending));
}
void CoreCalls::call_here(AgentCore& core, const Function& function, const Going& going,
                          const std::optional<Future<void>>& first,
                          std::unique_ptr<PendingCall> pending,
                          const std::function<Task(std::uint64_t)>& make) {
  core.call_here(issue_of(function, going), first, std::move(pending), make);
}
void CoreCalls::complete_here(AgentCore& core, std::uint64_t id,
                              const std::function<void(PendingCall&)>& how) {
  core.complete_here(id, how);
}
void CoreCalls::fail_here(AgentCore& core, const Function& function, std::uint64_t id,
                          const std::exception_ptr& error) {
  log_thrown(function, core.self(), text_of(error));
  const auto thrown = thrown_by(core, function, error);
  core.complete_here(id, [&](PendingCall& call) { call.fail(thrown); });
}
void CoreCalls::hold_activity(AgentCore& core, int change) { core.hold_activity(change); }
std::uint64_t CoreCalls::after(AgentCore& core, std::chrono::milliseconds pause, Task task) {
  return core.after(pause, std::move(task));
}

void CoreCalls::drop_pause(const std::weak_ptr<AgentCore>& core, std::uint64_t number) {
  if (const auto held = core.lock()) held->drop_pause(number);
}
void CoreCalls::off_loop(AgentCore& core, const Recipient& to, Task task) {
  core.off_loop(to, std::move(task));
}
std::shared_ptr<rref::Handle> CoreCalls::owner_handle(const std::shared_ptr<AgentCore>& core,
                                                      rref::Id id,
                                                      std::shared_ptr<rref::Owned> owned) {
  return std::make_shared<rref::Handle>(core, id, Member{core->self(), core->generation()},
                                        std::move(owned));
}
std::shared_ptr<rref::Handle> CoreCalls::user_handle(const std::shared_ptr<AgentCore>& core,
                                                     rref::Id id, rref::ForkId fork,
                                                     const Member& owner,
                                                     const Future<void>& created,
                                                     const rref::Origin& origin) {
  return std::make_shared<rref::Handle>(core, id, fork, owner, created, created, origin);
}
std::chrono::milliseconds CoreCalls::limit(AgentCore& core,
                                           std::optional<std::chrono::milliseconds> given) {
  return given && *given != kAgentTimeout ? usable_limit(*given, "a time limit") : core.timeout();
}
Going CoreCalls::going(AgentCore& core, const Destination& to) {
  return {core.recipient(to), core.limit_of(to), MessageKind::Call, false, to.place()};
}
Member CoreCalls::member(AgentCore& core, const Recipient& worker) {
  return core.directory().find(worker);
}
std::chrono::milliseconds CoreCalls::time_left() {
  const CallState& call = current_call("time_left()").call();
  if (call.cancelled || call.deadline.passed())
    throw Error(Blame::Cancelled, "nobody waits for it any more");
  return call.deadline.is_never() ? 0ms : std::max(1ms, call.deadline.remaining());
}
void CoreCalls::look_after(AgentCore& core, int rank) {
  core.look_after(rank, AgentCore::Asked::ByTheWay);
}
void CoreCalls::depend_on(AgentCore& core, int rank, int change) { core.depend_on(rank, change); }
void CoreCalls::heard_from(AgentCore& core, int rank) { core.heard_from(rank); }
bool CoreCalls::is_lost(AgentCore& core, int rank) { return core.is_lost(rank); }
void CoreCalls::will_not_come(const std::shared_ptr<AgentCore>& core, int owner, rref::Id id,
                              const std::exception_ptr& why) {
  try {
    std::rethrow_exception(why);
  } catch (const RemoteError&) {
    return;  // it comes from there
  } catch (const CreationError&) {
    return;
  } catch (...) {
  }
  rref::tell_will_not_come(core, owner, id, Outcome(to_error(why, Blame::Remote)));
}
std::shared_ptr<AgentCore> CoreCalls::current_core(const char* what) {
  return current_call(what).core();
}
const std::shared_ptr<AgentCore>& CoreCalls::of(const Agent& agent) {
  static_cast<void>(agent.self());  // throws where there is no agent
  return agent.shared_core();
}

namespace {
class FinishLocally final : public Completion<void> {
 public:
  FinishLocally(std::shared_ptr<AgentCore> core, const Function& function, std::uint64_t id)
      : core_(std::move(core)), function_(function), id_(id) {}
  void succeed(std::monostate, DeviceWorkRef) override {
    core_->complete_here(
        id_, [](PendingCall& call) { static_cast<PendingResult<void>&>(call).set({}, nullptr); });
  }
  void fail(const std::exception_ptr& error) override {
    CoreCalls::fail_here(*core_, function_, id_, error);
  }

 private:
  const std::shared_ptr<AgentCore> core_;
  const Function& function_;
  const std::uint64_t id_;
};
}  // namespace

CompletionRef<void> ends_here(const std::shared_ptr<AgentCore>& core, const Function& function,
                              std::uint64_t id) {
  return std::make_shared<FinishLocally>(core, function, id);
}

std::shared_ptr<rref::Handle> create_there(const std::shared_ptr<AgentCore>& core,
                                           const Function& function, const Going& going,
                                           const Packed& packed) {
  rref::References& references = core->references();
  const rref::Id id = references.next_id();
  const rref::ForkId fork = references.next_id();
  Promise<void> promise(core->thread_pool());
  const auto created = promise.future();
  const auto pack = [&](codec::Packer& packer) {
    packer.pack_array(std::tuple_size_v<CreationArguments>);
    packer.pack(id);
    packer.pack(fork);
    packed.pack(packer, packed.arguments);
  };
  const auto owner = core->send_call(issue_of(function, going), pack,
                                     std::make_unique<PendingResult<void>>(std::move(promise)));
  created.on_done_light(
      [weak = std::weak_ptr(core), to = going.to.rank, id](const Future<void>& ended) {
        const auto alive = weak.lock();
        if (const auto error = ended.error(); error && alive)
          CoreCalls::will_not_come(alive, to, id, error);
      });
  return CoreCalls::user_handle(core, id, fork, *owner, created, {function.name, -1, going.place});
}

}  // namespace detail

Agent::Agent(std::shared_ptr<AgentCore> core, bool leaves_when_dropped) : core_(std::move(core)) {
  if (!leaves_when_dropped) return;
  leave_when_dropped_ =
      std::shared_ptr<const void>(core_.get(), [kept = core_](const void*) { kept->leave(); });
}

AgentCore& Agent::core() const {
  if (!core_)
    throw Error(Blame::Caller, "this rpc::Agent was default-constructed; make one with rpc::init");
  core_->require_own();
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
Going Agent::going(const Destination& to, bool on_loop) const {
  Going going = detail::CoreCalls::going(core(), to);
  going.on_loop = on_loop;
  return going;
}

WorkerInfo Agent::worker(const Destination& who) const {
  return core().directory().find(core().recipient(who)).worker;
}
std::vector<WorkerInfo> Agent::workers() const { return core().directory().workers(); }
const WorkerInfo& Agent::self() const { return core().self(); }
bool Agent::alive(const Destination& worker) const { return core().alive(worker); }
void Agent::on_worker_lost(std::function<void(const WorkerInfo&, const Error&)> callback) const {
  core().on_worker_lost(std::move(callback));
}
void Agent::on_worker_joined(std::function<void(const WorkerInfo&)> callback) const {
  core().on_worker_joined(std::move(callback));
}
std::string Agent::transport_to(const Destination& worker) const {
  return core().transport_to(core().recipient(worker).rank);
}
void Agent::set_timeout(std::chrono::milliseconds limit) { core().set_timeout(limit); }
std::chrono::milliseconds Agent::timeout() const { return core().timeout(); }
void Agent::shutdown(const Graceful& options) { core().shutdown(options); }
void Agent::leave() {
  if (core_ && core_->is_inherited()) return core_->leave();
  core().leave();
}
DebugInfo Agent::debug_info() const { return core().debug_info(); }
std::string Agent::dump() const { return trace::dump("asked for by " + describe(self())); }

Agent& this_agent() { return current_call("rpc::this_agent()").agent(); }

CallInfo this_call() {
  const CallState& call = current_call("rpc::this_call()").call();
  return {call.caller, call.deadline, call.cancelled || call.deadline.passed()};
}

}  // namespace weft::rpc
