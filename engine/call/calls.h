// SPDX-License-Identifier: Apache-2.0
// How a body becomes a call: its entry in this process's table of functions, the calling side and
// the serving side.
#pragma once

#include <memory>
#include <utility>

#include <weft/base/export.h>
#include <weft/engine/call/body.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/call/pending.h>
#include <weft/engine/call/thread_pool.h>
#include <weft/engine/call/types.h>
#include <weft/engine/future/future.h>

namespace weft::call {

namespace detail {

// The functions of AgentCore that templates need; core.h documents them.
struct WEFT_API CoreCalls {
  static const std::shared_ptr<ThreadPool>& executor(AgentCore& core);
  static bool closed(AgentCore& core);
  static bool is_self(AgentCore& core, int rank);
  static int self(AgentCore& core);
  // Returns the worker that the call goes to.
  static std::shared_ptr<const Member> send_call(AgentCore& core, const Function& function,
                                                 const CallOptions& options,
                                                 const std::function<void(codec::Packer&)>& pack,
                                                 std::unique_ptr<PendingCall> pending);
  static void call_here(AgentCore& core, const Function& function, const CallOptions& options,
                        const std::optional<Future<void>>& first,
                        std::unique_ptr<PendingCall> pending,
                        const std::function<Task(std::uint64_t)>& make);
  static void complete_here(AgentCore& core, std::uint64_t id,
                            const std::function<void(PendingCall&)>& how);
  // Fails the call with an exception that a function threw on this worker itself. Its caller sees
  // the same error as from another worker.
  static void fail_here(AgentCore& core, const Function& function, std::uint64_t id,
                        const std::exception_ptr& error);
  static void hold_activity(AgentCore& core, int change);
  static std::uint64_t after(AgentCore& core, std::chrono::milliseconds pause, Task task);
  static void drop_pause(const std::weak_ptr<AgentCore>& core, std::uint64_t number);
  static void off_loop(AgentCore& core, const Recipient& to, Task task);
  static std::chrono::milliseconds limit(AgentCore& core,
                                         std::optional<std::chrono::milliseconds> given);
  static CallOptions call_options(AgentCore& core, const Destination& to);
  static Member member(AgentCore& core, const Recipient& worker);
  // The time left to the call that this thread runs; 0 = no limit. Throws Cancelled if nobody waits
  // for the call any more.
  static std::chrono::milliseconds time_left();
  static void look_after(AgentCore& core, int rank);
  static void depend_on(AgentCore& core, int rank, int change);
  static bool is_lost(AgentCore& core, int rank);
  static void heard_from(AgentCore& core, int rank);
  // The agent of the call that this thread runs. Throws Caller outside of one.
  static std::shared_ptr<AgentCore> current_core(const char* what);
  // Defined by the facade (rpc/agent.cc). `of` returns an agent's core, and throws Caller for a
  // default-constructed agent. `handle` returns an agent that does not leave the job when it is
  // dropped.
  static const std::shared_ptr<AgentCore>& of(const Agent& agent);
  static std::shared_ptr<Agent> handle(const std::shared_ptr<AgentCore>& core);
};

// The type as which an argument of a constructor is sent.
template <class A>
using Travelling = std::conditional_t<std::is_convertible_v<std::decay_t<A>, const char*>,
                                      std::string, std::decay_t<A>>;

// Sends a call's result back to its caller.
template <class R>
class SendReply final : public Completion<R> {
 public:
  explicit SendReply(std::shared_ptr<IncomingCall> call) : call_(std::move(call)) {}
  void succeed(weft::detail::Stored<R> value, DeviceWorkRef work) override {
    succeed_with(value, std::move(work));
  }
  void succeed_with(const weft::detail::Stored<R>& value, DeviceWorkRef work) override {
    weft::detail::run_after(
        work, [&] { call_->reply([&](codec::Packer& packer) { pack_result<R>(packer, value); }); });
  }
  void fail(const std::exception_ptr& error) override { call_->fail(error); }

 private:
  const std::shared_ptr<IncomingCall> call_;
};

// Completes a call that this worker made to itself.
template <class R>
class CompleteLocally final : public Completion<R> {
 public:
  CompleteLocally(std::shared_ptr<AgentCore> core, const Function& function, std::uint64_t id)
      : core_(std::move(core)), function_(function), id_(id) {}
  void succeed(weft::detail::Stored<R> value, DeviceWorkRef work) override {
    auto all = weft::detail::join(std::move(work), enqueued(*core_));
    CoreCalls::complete_here(*core_, id_, [&](PendingCall& call) {
      static_cast<PendingResult<R>&>(call).set(std::move(value), std::move(all));
    });
  }
  void fail(const std::exception_ptr& error) override {
    CoreCalls::fail_here(*core_, function_, id_, error);
  }

 private:
  const std::shared_ptr<AgentCore> core_;
  const Function& function_;
  const std::uint64_t id_;
};

template <class R>
void serve_call(const std::shared_ptr<IncomingCall>& call, std::shared_ptr<void> arguments,
                First first, Run<R> run) {
  const auto waits_for = first != nullptr ? first(*call->core(), arguments.get()) : std::nullopt;
  call->start(waits_for, Task([call, arguments = std::move(arguments), run] {
                run(*call->core(), arguments, std::make_shared<SendReply<R>>(call));
              }));
}

// Registers and serves the calls of a body whose result is sent back.
template <class Body>
struct Called {
  static void serve(const std::shared_ptr<IncomingCall>& call, const msgpack::object& object) {
    using Arguments = typename Body::Arguments;
    serve_call<typename Body::Result>(call,
                                      std::make_shared<Arguments>(unpack_tuple<Arguments>(object)),
                                      Body::first, &Body::run);
  }

  inline static const Function& entered =
      *enter(entry(Body::name(), typeid(typename Body::Signature), /*stays=*/false, Body::value(),
                   &Called::serve));
};

// Arguments for another worker: a tuple, and the function that packs it.
struct Packed {
  const void* arguments = nullptr;
  void (*pack)(codec::Packer& packer, const void* arguments) = nullptr;
};

template <class Arguments>
void pack_as(codec::Packer& packer, const void* arguments) {
  pack_tuple(packer, *static_cast<const Arguments*>(arguments));
}

template <class R>
Future<R> call_there(AgentCore& core, const Function& function, const CallOptions& options,
                     const Packed& packed) {
  Promise<R> promise(CoreCalls::executor(core));
  auto future = promise.future();
  CoreCalls::send_call(
      core, function, options,
      [&](codec::Packer& packer) { packed.pack(packer, packed.arguments); },
      std::make_unique<PendingResult<R>>(std::move(promise)));
  return future;
}

template <class R>
Future<R> call_here(const std::shared_ptr<AgentCore>& core, const Function& function,
                    const CallOptions& options, const std::shared_ptr<void>& arguments, First first,
                    Run<R> run) {
  Promise<R> promise(CoreCalls::executor(*core));
  auto future = promise.future();
  CoreCalls::call_here(
      *core, function, options, first != nullptr ? first(*core, arguments.get()) : std::nullopt,
      std::make_unique<PendingResult<R>>(std::move(promise)), [&](std::uint64_t id) {
        return Task([core, arguments, run, &function, id] {
          run(*core, arguments, std::make_shared<CompleteLocally<R>>(core, function, id));
        });
      });
  return future;
}

}  // namespace detail

// Issues a call with its arguments in a tuple of the parameters' types. For a call to this worker
// itself they are not serialised.
template <class Body>
Future<typename Body::Result> issue(const std::shared_ptr<AgentCore>& core,
                                    const CallOptions& options,
                                    typename Body::Arguments arguments) {
  using Arguments = typename Body::Arguments;
  const Function& function = detail::shown(detail::Called<Body>::entered, arguments);
  if (!detail::CoreCalls::is_self(*core, options.to.rank)) {
    return detail::call_there<typename Body::Result>(*core, function, options,
                                                     {&arguments, &detail::pack_as<Arguments>});
  }
  return detail::call_here<typename Body::Result>(core, function, options,
                                                  std::make_shared<Arguments>(std::move(arguments)),
                                                  Body::first, &Body::run);
}

}  // namespace weft::call
