// RPC: typed calls of functions in other processes, with tensors as arguments and results. Public
// form: docs/rpc.md.
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

class AgentCore;

class WEFT_API Agent {
  template <auto F>
  using Result = detail::ResultOf<F>;

  template <auto F, class... A>
  auto issue(const Destination& to, A&&... arguments) const {
    using Naming = detail::NamingOf<F>;
    using Body = detail::FunctionBody<Naming::function>;
    return call<Body>(core_, call_options(to, Naming::on_loop),
                      typename Body::Arguments(std::forward<A>(arguments)...));
  }

 public:
  Agent() = default;  // no agent: only assignment is allowed
  explicit Agent(std::shared_ptr<AgentCore> core, bool leaves_when_dropped);

  // Calls the function and waits for its result. Throws RemoteError when it threw, Timeout,
  // PeerLost, Caller.
  template <auto F, class... A>
  Result<F> sync(const Destination& to,
                 A&&... arguments) const {  // of overloads: static_cast<R (*)(P...)>(&f)
    if constexpr (detail::RefusalOfCall<F, /*stays=*/false, A...>::accept()) {
      return issue<F>(to, std::forward<A>(arguments)...).get_own();
    } else {
      std::terminate();
    }
  }
  // At once. The arguments' tensors may still be sent then: their memory is left alone until the
  // future is done (docs/rpc.md).
  template <auto F, class... A>
  Future<Result<F>> async(const Destination& to,
                          A&&... arguments) const {  // of overloads: static_cast<R (*)(P...)>(&f)
    if constexpr (detail::RefusalOfCall<F, /*stays=*/false, A...>::accept()) {
      return detail::tracked(issue<F>(to, std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }
  // The result stays with the callee; what comes back, at once, is a reference to it. The
  // arguments' tensors are left alone until its created() is done.
  template <auto F, class... A>
  RRef<Result<F>> remote(const Destination& to,
                         A&&... arguments) const {  // of overloads: static_cast<R (*)(P...)>(&f)
    if constexpr (detail::RefusalOfCall<F, /*stays=*/true, A...>::accept()) {
      using Naming = detail::NamingOf<F>;
      using Body = detail::FunctionBody<Naming::function>;
      return RRef<typename Body::Result>(
          create<Body>(core_, call_options(to, Naming::on_loop),
                       typename Body::Arguments(std::forward<A>(arguments)...)));
    } else {
      std::terminate();
    }
  }
  // An M made in place there, by std::make_shared<M>(arguments…). The arguments travel as their
  // decayed types, text as std::string.
  template <class M, class... A>
  RRef<M> remote(const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfConstructor<M, detail::Travelling<A>...>::accept()) {
      using Body = detail::ConstructorBody<M, detail::Travelling<A>...>;
      return RRef<M>(create<Body>(
          core_, call_options(to, false),
          typename Body::Arguments(detail::Travelling<A>(std::forward<A>(arguments))...)));
    } else {
      std::terminate();
    }
  }

  // A registered operator that gives a tensor, by name; see operators.h.
  template <class... A>
  at::Tensor sync_op(const std::string& name, const Destination& to, A&&... arguments) const {
    return issue_op(name, to, {detail::operator_value(std::forward<A>(arguments))...}).get_own();
  }
  template <class... A>
  Future<at::Tensor> async_op(const std::string& name, const Destination& to,
                              A&&... arguments) const {
    return detail::tracked(
        issue_op(name, to, {detail::operator_value(std::forward<A>(arguments))...}));
  }
  template <class... A>
  RRef<at::Tensor> remote_op(const std::string& name, const Destination& to,
                             A&&... arguments) const {
    return create_op(name, to, {detail::operator_value(std::forward<A>(arguments))...});
  }

  // TorchScript that the callee's program exposes, by name: "math.scale"; see script.h.
  template <class R = at::Tensor, class... A>
  R sync_script(const std::string& name, const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfScript<R, A...>::accept()) {
      return sync<&run_script<R>>(to, name, script_arguments(std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }
  template <class R = at::Tensor, class... A>
  Future<R> async_script(const std::string& name, const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfScript<R, A...>::accept()) {
      return async<&run_script<R>>(to, name, script_arguments(std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }
  template <class R = at::Tensor, class... A>
  RRef<R> remote_script(const std::string& name, const Destination& to, A&&... arguments) const {
    if constexpr (detail::RefusalOfScript<R, A...>::accept()) {
      return remote<&run_script<R>>(to, name, script_arguments(std::forward<A>(arguments)...));
    } else {
      std::terminate();
    }
  }

  // Throws PeerLost for a worker that has left or is lost, Caller for a name or rank that never was
  // there.
  WorkerInfo worker(const Destination& who) const;
  std::vector<WorkerInfo> workers() const;
  const WorkerInfo& self() const;
  // Whether that worker is in the job and not known to be lost. Of a worker that was killed this
  // becomes false when its death is known. May look into the job's store. Throws Caller once the
  // agent has left.
  bool alive(const Destination& worker) const;
  // `callback` is called for each worker that is lost from now on, once, with PeerLost and why; not
  // for workers that leave or shut down, nor for this one. Where the number of workers is given:
  // for those that this one has a connection with.
  void on_worker_lost(std::function<void(const WorkerInfo&, const Error&)> callback) const;
  // For each worker that joins from now on, where workers come and go. Of two workers of one name,
  // or rank, the first is lost before the second joins.
  //
  // Callbacks run on the agent's threads, one at a time and in order: they may call, wait and
  // leave, but not shut down. What they throw is logged. They are dropped when the agent leaves;
  // one that keeps a copy of the agent keeps it from leaving by its destructor: capture a
  // reference, or use this_agent(). Throws Caller for an empty function.
  void on_worker_joined(std::function<void(const WorkerInfo&)> callback) const;
  // By which transport calls reach that worker ("shm"): it is chosen at the first call, and anew
  // after a lane was lost. Empty where no lane stands, and for this worker itself. Throws as
  // worker(), and Caller once the agent has left.
  std::string transport_to(const Destination& worker) const;

  // The default limit of calls issued from now on; 0 = none.
  void set_timeout(std::chrono::milliseconds limit);
  std::chrono::milliseconds timeout() const;

  // Waits until no call is active anywhere, calls that calls cause included, and serves meanwhile;
  // then leaves. All workers call it. Throws Timeout, naming who is busy, and PeerLost; the agent
  // has left then as well. While one goes on another waits for it and has its outcome; afterwards
  // it does nothing. In a function or a continuation that this agent runs, for whose end it would
  // wait, it throws Caller at once and changes nothing.
  void shutdown(const Graceful& options = {});
  // Leaves at once: calls that wait here end with Cancelled, those of others to here with PeerLost.
  // Functions that run are waited for. The destructor of the last copy leaves as well.
  void leave();

  // Also of an agent that has left: what it really still holds.
  DebugInfo debug_info() const;
  // What this process did last, as JSON for weft-debug analyze.
  std::string dump() const;
  const std::shared_ptr<AgentCore>& shared_core() const { return core_; }

 private:
  // In agent.cc: what a call of one function comes to would be compiled in each file that includes
  // this.
  Future<at::Tensor> issue_op(const std::string& name, const Destination& to,
                              std::vector<OperatorValue> arguments) const;
  RRef<at::Tensor> create_op(const std::string& name, const Destination& to,
                             std::vector<OperatorValue> arguments) const;
  CallOptions call_options(const Destination& to, bool on_loop) const;
  AgentCore& core() const;
  std::shared_ptr<AgentCore> core_;
  std::shared_ptr<const void> leave_when_dropped_;
};

// Joins the job under this name; blocks until all workers have, where their number is known. Where
// workers come and go, a name or rank of a worker that was killed is free. Throws Caller for wrong
// or taken names and ranks, Timeout.
WEFT_API Agent init(const std::string& name, Options options = {});

// Inside a called function, its continuations and coroutines: the agent that runs it, and who
// called. Throws Caller elsewhere.
WEFT_API Agent& this_agent();
WEFT_API CallInfo this_call();

namespace detail {

template <class Body>
void expose_created() {
  static_cast<void>(Created<Body>::entered.id);
  static_cast<void>(&rref::expose_value<typename Body::Result>);
  static_cast<void>(&rref::Exposed<typename Body::Arguments>::references);
}

template <class Body>
void expose_called() {
  using Result = typename Body::Result;
  if constexpr (detail::RefusalOfResult<Result>::fine) static_cast<void>(Called<Body>::entered.id);
  expose_created<Body>();
}

}  // namespace detail

// These make something callable by programs that are not this one, where this one does not call it
// remotely itself: in all ways (sync, async, remote, inline_), with all that a reference to the
// result, or to an argument, is used for.
//
// A method on an RRef<M>: a member function, perhaps of a base, or a function that takes M& first.
template <class M, auto F>
void expose() {
  if constexpr (detail::RefusalOfExposed<F, M>::accept()) {
    detail::expose_called<detail::MethodBody<F, M>>();
    static_cast<void>(&rref::expose_value<M>);
  }
}
// remote<M>(…), with arguments that are of these types as they travel: "text" is a std::string.
template <class M, class... A>
void expose() {
  if constexpr (detail::RefusalOfConstructor<M, detail::Travelling<A>...>::accept()) {
    detail::expose_created<detail::ConstructorBody<M, detail::Travelling<A>...>>();
  }
}
// A function; or a member function, on RRefs of its class.
template <auto F>
void expose() {
  using Module = typename detail::ShapeOf<std::remove_const_t<decltype(F)>>::Module;
  if constexpr (detail::RefusalOfExposed<F, Module>::accept()) {
    if constexpr (std::is_void_v<Module>) {
      detail::expose_called<detail::FunctionBody<F>>();
    } else {
      expose<Module, F>();
    }
  }
}

}  // namespace weft::rpc
