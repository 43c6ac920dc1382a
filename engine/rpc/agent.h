// SPDX-License-Identifier: Apache-2.0
// RPC: typed calls of functions in other processes, with tensors as arguments and results; see
// docs/rpc.md.
//
//   at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
//   auto agent = weft::rpc::init("worker0", {.rank = 0, .world_size = 2});
//   at::Tensor sum = agent.sync<&add>("worker1", x, y);
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/types.h>
#include <weft/engine/call/wait_all.h>
#include <weft/engine/future/future.h>
#include <weft/engine/rpc/operators.h>
#include <weft/engine/rpc/script.h>
#include <weft/engine/rref/rref.h>

namespace weft::rpc {

// One worker's end of remote calls. Copies refer to the same agent; any thread may use them.
class WEFT_API Agent {
  template <auto F>
  using Result = call::detail::ResultOf<F>;

  template <auto F, class... A>
  auto issue(const Destination& to, A&&... arguments) const {
    using Naming = call::detail::NamingOf<F>;
    using Body = call::detail::FunctionBody<Naming::function>;
    return call::issue<Body>(core_, call_options(to, Naming::on_loop),
                             typename Body::Arguments(std::forward<A>(arguments)...));
  }

 public:
  Agent() = default;  // no agent: only assignment is allowed
  // For Weft's own use.
  explicit Agent(std::shared_ptr<call::AgentCore> core, bool leaves_when_dropped);

  // Calls the function and waits for its result. Throws RemoteError if the function threw; Timeout,
  // PeerLost, Caller. The comment in the declaration says how to name an overloaded function:
  // compilers show that line where the name is ambiguous.
  template <auto F, class... A>
  auto sync(const Destination& to, A&&... arguments) const  // static_cast<R (*)(P...)>(&f)
      -> Result<F> {
    if constexpr (call::detail::RefusalOfCall<F, /*stays=*/false, A...>::accept()) {
      return issue<F>(to, std::forward<A>(arguments)...).get_own();
    } else {
      std::terminate();
    }
  }
  // Calls the function and returns at once. The tensors of the arguments may still have to be sent
  // then: leave their memory alone until the future is done (docs/rpc.md).
  template <auto F, class... A>
  auto async(const Destination& to, A&&... arguments) const  // static_cast<R (*)(P...)>(&f)
      -> Future<Result<F>> {
    if constexpr (call::detail::RefusalOfCall<F, /*stays=*/false, A...>::accept()) {
      return call::detail::tracked(issue<F>(to, std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }
  // Returns at once, with a reference to the result, which stays with the callee. Leave the tensors
  // of the arguments alone until created() of the reference is done.
  template <auto F, class... A>
  auto remote(const Destination& to, A&&... arguments) const  // static_cast<R (*)(P...)>(&f)
      -> RRef<Result<F>> {
    if constexpr (call::detail::RefusalOfCall<F, /*stays=*/true, A...>::accept()) {
      using Naming = call::detail::NamingOf<F>;
      using Body = call::detail::FunctionBody<Naming::function>;
      return RRef<typename Body::Result>(
          rref::create<Body>(core_, call_options(to, Naming::on_loop),
                             typename Body::Arguments(std::forward<A>(arguments)...)));
    } else {
      std::terminate();
    }
  }
  // Makes an M in place on the callee, by std::make_shared<M>(arguments…). The arguments are sent
  // as their decayed types, text as std::string.
  template <class M, class... A>
  RRef<M> remote(const Destination& to, A&&... arguments) const {
    if constexpr (rref::detail::RefusalOfConstructor<M, call::detail::Travelling<A>...>::accept()) {
      using Body = rref::detail::ConstructorBody<M, call::detail::Travelling<A>...>;
      return RRef<M>(rref::create<Body>(
          core_, call_options(to, false),
          typename Body::Arguments(call::detail::Travelling<A>(std::forward<A>(arguments))...)));
    } else {
      std::terminate();
    }
  }

  // Calls a registered operator that returns a tensor, by name; see operators.h.
  template <class... A>
  at::Tensor sync_op(const std::string& name, const Destination& to, A&&... arguments) const {
    return issue_op(name, to, {detail::operator_value(std::forward<A>(arguments))...}).get_own();
  }
  // Like sync_op(), at once: returns a future of the result.
  template <class... A>
  Future<at::Tensor> async_op(const std::string& name, const Destination& to,
                              A&&... arguments) const {
    return call::detail::tracked(
        issue_op(name, to, {detail::operator_value(std::forward<A>(arguments))...}));
  }
  // Like sync_op(), at once: the result stays with the callee, and a reference to it is returned.
  template <class... A>
  RRef<at::Tensor> remote_op(const std::string& name, const Destination& to,
                             A&&... arguments) const {
    return create_op(name, to, {detail::operator_value(std::forward<A>(arguments))...});
  }

  // Calls TorchScript that the callee's program exposes, by name ("math.scale"); see script.h.
  template <class R = at::Tensor, class... A>
  R sync_script(const std::string& name, const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfScript<R, A...>::accept()) {
      return sync<&run_script<R>>(to, name, script_arguments(std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }
  // Like sync_script(), at once: returns a future of the result.
  template <class R = at::Tensor, class... A>
  Future<R> async_script(const std::string& name, const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfScript<R, A...>::accept()) {
      return async<&run_script<R>>(to, name, script_arguments(std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }
  // Like sync_script(), at once: the result stays with the callee, and a reference to it is
  // returned.
  template <class R = at::Tensor, class... A>
  RRef<R> remote_script(const std::string& name, const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfScript<R, A...>::accept()) {
      return remote<&run_script<R>>(to, name, script_arguments(std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }

  // Throws PeerLost for a worker that has left or is lost, Caller for a name or rank that no worker
  // ever had.
  WorkerInfo worker(const Destination& who) const;
  // All workers of the job, this one included, as far as this agent knows them.
  std::vector<WorkerInfo> workers() const;
  // This worker.
  const WorkerInfo& self() const;
  // Whether that worker is in the job and not known to be lost. For a worker that was killed, this
  // becomes false when its death is known. May read the job's store. Throws Caller once the agent
  // has left.
  bool alive(const Destination& worker) const;
  // Calls `callback` once for each worker that is lost from now on, with PeerLost and the reason;
  // not for workers that leave or shut down, nor for this one. If the number of workers is given:
  // only for those that this one has a connection with.
  void on_worker_lost(std::function<void(const WorkerInfo&, const Error&)> callback) const;
  // Calls `callback` for each worker that joins from now on, where workers come and go. If two
  // workers have one name or rank, the first is reported lost before the second is reported to
  // join.
  //
  // Callbacks run on the agent's threads, one at a time and in order. They may call, wait and
  // leave, but not shut down. Their exceptions are logged. They are dropped when the agent leaves.
  // A callback that keeps a copy of the agent keeps the agent's destructor from leaving: capture a
  // reference, or use this_agent(). Throws Caller for an empty function.
  void on_worker_joined(std::function<void(const WorkerInfo&)> callback) const;
  // The transport by which calls reach that worker ("shm"). It is chosen at the first call, and
  // again after a connection was lost. Empty if there is no connection, and for this worker itself.
  // Throws as worker() does, and Caller once the agent has left.
  std::string transport_to(const Destination& worker) const;

  // The default limit of calls issued from now on; 0 = none.
  void set_timeout(std::chrono::milliseconds limit);
  // The default limit; 0 for none.
  std::chrono::milliseconds timeout() const;

  // Waits until no call is active anywhere, including calls that calls make, and serves calls
  // meanwhile; then leaves. All workers call it. Throws Timeout, naming the busy workers, and
  // PeerLost; then too the agent has left. A second shutdown() during the first one waits for it
  // and has its outcome; a later one does nothing. In a function or a continuation that this agent
  // runs, whose end it would have to wait for, it throws Caller at once and changes nothing.
  void shutdown(const Graceful& options = {});
  // Leaves at once: calls from here end with Cancelled, calls of others to here with PeerLost.
  // Waits for functions that run. The destructor of the last copy leaves as well.
  void leave();

  // May be called after the agent has left: then it counts the things that are still held.
  DebugInfo debug_info() const;
  // The last operations of this process, as JSON for weft-debug analyze.
  std::string dump() const;
  // For Weft's own use.
  const std::shared_ptr<call::AgentCore>& shared_core() const { return core_; }

 private:
  // Defined in agent.cc, so that the code of their calls is not compiled in each file that includes
  // this one.
  Future<at::Tensor> issue_op(const std::string& name, const Destination& to,
                              std::vector<OperatorValue> arguments) const;
  RRef<at::Tensor> create_op(const std::string& name, const Destination& to,
                             std::vector<OperatorValue> arguments) const;
  call::CallOptions call_options(const Destination& to, bool on_loop) const;
  call::AgentCore& core() const;
  std::shared_ptr<call::AgentCore> core_;
  std::shared_ptr<const void> leave_when_dropped_;
};

// Joins the job under this name. Blocks until all workers have joined, if their number is known.
// Where workers come and go, the name and the rank of a worker that was killed are free. Throws
// Caller for a name or rank that is invalid or taken; Timeout.
WEFT_API Agent init(const std::string& name, Options options = {});

// Inside a called function, its continuations and coroutines: the agent that runs it, and the call.
// Throws Caller elsewhere.
WEFT_API Agent& this_agent();
// The call that this thread runs. Throws Caller elsewhere.
WEFT_API CallInfo this_call();

namespace detail {

template <class Body>
void expose_created() {
  static_cast<void>(rref::detail::Created<Body>::entered.id);
  static_cast<void>(&rref::detail::expose_value<typename Body::Result>);
  static_cast<void>(&rref::detail::Exposed<typename Body::Arguments>::references);
}

template <class Body>
void expose_called() {
  using Result = typename Body::Result;
  if constexpr (call::detail::RefusalOfResult<Result>::fine)
    static_cast<void>(call::detail::Called<Body>::entered.id);
  expose_created<Body>();
}

}  // namespace detail

// expose() lets other programs call something that this program does not call remotely itself: in
// all ways (sync, async, remote, inline_), and with everything that a reference to the result, or
// to an argument, is used for.
//
// A method on an RRef<M>: a member function, perhaps of a base, or a function that takes M& first.
template <class M, auto F>
void expose() {
  if constexpr (rref::detail::RefusalOfExposed<F, M>::accept()) {
    detail::expose_called<rref::detail::MethodBody<F, M>>();
    static_cast<void>(&rref::detail::expose_value<M>);
  }
}
// remote<M>(…), with arguments that are sent as these types: "text" is a std::string.
template <class M, class... A>
void expose() {
  if constexpr (rref::detail::RefusalOfConstructor<M, call::detail::Travelling<A>...>::accept()) {
    detail::expose_created<rref::detail::ConstructorBody<M, call::detail::Travelling<A>...>>();
  }
}
// A function, or a member function on RRefs of its class.
template <auto F>
void expose() {
  using Module = typename call::detail::ShapeOf<std::remove_const_t<decltype(F)>>::Module;
  if constexpr (rref::detail::RefusalOfExposed<F, Module>::accept()) {
    if constexpr (std::is_void_v<Module>) {
      detail::expose_called<call::detail::FunctionBody<F>>();
    } else {
      expose<Module, F>();
    }
  }
}

}  // namespace weft::rpc
