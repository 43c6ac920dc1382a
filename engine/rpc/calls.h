// How bodies become calls: the entry in this process's table, the calling side and the serving side.
#pragma once

#include <memory>
#include <utility>

#include <weft/engine/future/future.h>
#include <weft/engine/rpc/body.h>
#include <weft/engine/rpc/crew.h>
#include <weft/engine/rpc/pending.h>
#include <weft/engine/rpc/served.h>
#include <weft/engine/rpc/types.h>

namespace weft::rpc {

// How one call goes out.
struct Going {
  Recipient to;
  std::chrono::milliseconds limit{0};  // 0 = none
  MessageKind kind = MessageKind::Call;
  bool on_loop = false;
  Place place = {};  // in the program, where it is known
  // Its tensors go where those that came in the receiver's calls came from: by the inverse of the receiver's device map.
  bool back = false;
};

namespace detail {

// The core, as templates need it; core.h says what the functions do.
struct CoreCalls {
  static const std::shared_ptr<Crew>& home(AgentCore& core);
  static bool closed(AgentCore& core);
  static bool is_self(AgentCore& core, int rank);
  static int self(AgentCore& core);
  // Gives whom it goes to.
  static std::shared_ptr<const Member> send_call(AgentCore& core, const Function& function, const Going& going,
                                                 const std::function<void(codec::Packer&)>& pack,
                                                 std::unique_ptr<PendingCall> pending);
  static void call_here(AgentCore& core, const Function& function, const Going& going,
                        const std::optional<Future<void>>& first, std::unique_ptr<PendingCall> pending,
                        const std::function<Task(std::uint64_t)>& make);
  static void complete_here(AgentCore& core, std::uint64_t id, const std::function<void(PendingCall&)>& how);
  // What a function threw on this worker itself, as its caller sees it: the same as from another.
  static std::exception_ptr thrown_here(AgentCore& core, const Function& function, const std::exception_ptr& error);
  // What this thread has enqueued on its current streams of the GPUs that calls use here; null where they use none.
  static weft::detail::DeviceWorkRef enqueued(AgentCore& core);
  static void hold_activity(AgentCore& core, int change);
  static void after(AgentCore& core, std::chrono::milliseconds pause, Task task);
  static void off_loop(AgentCore& core, const Recipient& to, Task task);
  static std::shared_ptr<rref::Handle> owner_handle(const std::shared_ptr<AgentCore>& core, rref::Id id,
                                                    std::shared_ptr<rref::Owned> owned);
  static std::shared_ptr<rref::Handle> user_handle(const std::shared_ptr<AgentCore>& core, rref::Id id, rref::ForkId fork,
                                                   const Member& owner, const Future<void>& created,
                                                   const rref::Origin& origin);
  static std::chrono::milliseconds limit(AgentCore& core, std::optional<std::chrono::milliseconds> given);
  static Going going(AgentCore& core, const Destination& to);
  static Member member(AgentCore& core, const Recipient& worker);
  // Of the call that this thread runs; 0 = no limit. Throws Cancelled where nobody waits for it any more.
  static std::chrono::milliseconds time_left();
  static void look_after(AgentCore& core, int rank);
  static void depend_on(AgentCore& core, int rank, int change);
  static bool is_lost(AgentCore& core, int rank);
  static void heard_from(AgentCore& core, int rank);
  // To the owner of a value whose creation has failed here: others may wait for it.
  static void will_not_come(const std::shared_ptr<AgentCore>& core, int owner, rref::Id id, const std::exception_ptr& why);
  // The agent of the call that this thread runs. Throws Caller outside of one.
  static std::shared_ptr<AgentCore> ambient(const char* what);
  static const std::shared_ptr<AgentCore>& of(const Agent& agent);
};

// As what an argument of a constructor travels.
template <class A>
using Travelling = std::conditional_t<std::is_convertible_v<std::decay_t<A>, const char*>, std::string, std::decay_t<A>>;

// A call whose result goes back.
template <class Body>
struct Called {
  static_assert(check_result<typename Body::Result>());
  static Function describe() {
    Function function;
    function.name = Body::name();
    function.signature = spelled(typeid(typename Body::Signature));
    function.id = {hash_of(function.name), hash_of(typeid(typename Body::Signature).name())};
    function.value = Body::value();
    function.serve = &Called::serve;
    return function;
  }
  inline static const Function& entered = enter(describe());

  static void serve(const std::shared_ptr<Served>& call, const msgpack::object& object) {
    using Arguments = typename Body::Arguments;
    using Result = typename Body::Result;
    auto arguments = std::make_shared<Arguments>(unpack_tuple<Arguments>(object));
    const auto first = Body::first(*call->core(), *arguments);
    call->start(first, Task([call, arguments] {
                  Body::run(
                      *call->core(), arguments,
                      [call](const weft::detail::Stored<Result>& value, const DeviceWorkRef& work) {
                        weft::detail::run_after(
                            work, [&] { call->reply([&](codec::Packer& packer) { pack_result<Result>(packer, value); }); });
                      },
                      [call](const std::exception_ptr& error) { call->fail(error); });
                }));
  }
};

// A call whose result stays: its arguments are the RRef's id, the caller's fork, and the body's.
template <class Body>
struct Created {
  using Result = typename Body::Result;
  using Value = std::shared_ptr<rref::OwnedValue<Result>>;
  using Arguments = std::tuple<rref::Id, rref::ForkId, msgpack::object>;

  static Function describe() {
    Function function;
    function.name = Body::name();
    function.signature = "RRef to the result of " + spelled(typeid(typename Body::Signature));
    function.id = {hash_of(function.name), hash_of(std::string("RRef ").append(typeid(typename Body::Signature).name()))};
    function.value = Body::value();
    function.serve = &Created::serve;
    return function;
  }
  inline static const Function& entered = enter(describe());

  static void serve(const std::shared_ptr<Served>& call, const msgpack::object& object) {
    auto [id, fork, packed] = unpack_tuple<Arguments>(object);
    auto arguments = std::make_shared<typename Body::Arguments>(unpack_tuple<typename Body::Arguments>(packed));
    auto value = references_of(*call->core()).template adopt<Result>(id, fork, call->state().incarnation());
    call->keep(value);
    std::optional<Future<void>> first;
    try {
      first = Body::first(*call->core(), *arguments);
    } catch (...) {  // others may wait for it already
      value->fail(std::current_exception());
      throw;
    }
    call->start(first, Task([call, arguments, value] {
                  make(
                      *call->core(), arguments, value,
                      [call] { call->reply([](codec::Packer& packer) { packer.pack_nil(); }); },
                      [call](const std::exception_ptr& error) { call->fail(error); });
                }));
  }

  template <class Done, class Fail>
  static void make(AgentCore& core, const std::shared_ptr<typename Body::Arguments>& arguments, const Value& value,
                   Done done, Fail fail) {
    Body::make(
        core, arguments,
        [&core, value, done](std::shared_ptr<Result> made, weft::detail::DeviceWorkRef work) {
          auto all = weft::detail::join(std::move(work), CoreCalls::enqueued(core));
          done();  // first: what waits behind the value is answered after its creation
          value->set(std::move(made), std::move(all));
        },
        [value, fail](const std::exception_ptr& error) {
          value->fail(error);
          fail(error);
        });
  }
};

}  // namespace detail

// A call with its arguments in a tuple of the parameters' types. To this worker itself they are not serialised.
template <class Body>
Future<typename Body::Result> call(const std::shared_ptr<AgentCore>& core, const Going& going,
                                   typename Body::Arguments arguments) {
  using Result = typename Body::Result;
  const Function& function = detail::Called<Body>::entered;
  Promise<Result> promise(detail::CoreCalls::home(*core));
  auto future = promise.future();
  auto pending = std::make_unique<PendingResult<Result>>(std::move(promise));
  if (!detail::CoreCalls::is_self(*core, going.to.rank)) {
    detail::CoreCalls::send_call(
        *core, function, going, [&](codec::Packer& packer) { detail::pack_tuple(packer, arguments); }, std::move(pending));
    return future;
  }
  auto kept = std::make_shared<typename Body::Arguments>(std::move(arguments));
  detail::CoreCalls::call_here(
      *core, function, going, Body::first(*core, *kept), std::move(pending), [&](std::uint64_t id) {
        return Task([core, &function, kept, id] {
          Body::run(
              *core, kept,
              [core, id](weft::detail::Stored<Result> value, weft::detail::DeviceWorkRef work) {
                auto all = weft::detail::join(std::move(work), detail::CoreCalls::enqueued(*core));
                detail::CoreCalls::complete_here(*core, id, [&](PendingCall& call) {
                  static_cast<PendingResult<Result>&>(call).set(std::move(value), std::move(all));
                });
              },
              [core, &function, id](const std::exception_ptr& error) {
                const auto thrown = detail::CoreCalls::thrown_here(*core, function, error);
                detail::CoreCalls::complete_here(*core, id, [&](PendingCall& call) { call.fail(thrown); });
              });
        });
      });
  return future;
}

// A call whose result stays where it was made; returns at once.
template <class Body>
std::shared_ptr<rref::Handle> create(const std::shared_ptr<AgentCore>& core, Going going,
                                     typename Body::Arguments arguments) {
  using Created = detail::Created<Body>;
  using Result = typename Body::Result;
  going.kind = MessageKind::Create;
  const Function& function = Created::entered;
  rref::References& references = detail::references_of(*core);
  const rref::Id id = references.next_id();
  Promise<void> promise(detail::CoreCalls::home(*core));
  const auto created = promise.future();
  auto pending = std::make_unique<PendingResult<void>>(std::move(promise));
  if (!detail::CoreCalls::is_self(*core, going.to.rank)) {
    const rref::ForkId fork = references.next_id();
    const auto pack = [&](codec::Packer& packer) {
      packer.pack_array(3);
      packer.pack(id);
      packer.pack(fork);
      detail::pack_tuple(packer, arguments);
    };
    const auto owner = detail::CoreCalls::send_call(*core, function, going, pack, std::move(pending));
    created.on_done_light([weak = std::weak_ptr(core), to = going.to.rank, id](const Future<void>& ended) {
      const auto alive = weak.lock();
      if (const auto error = ended.error(); error && alive) detail::CoreCalls::will_not_come(alive, to, id, error);
    });
    return detail::CoreCalls::user_handle(core, id, fork, *owner, created, {function.name, -1, going.place});
  }
  auto value = std::make_shared<rref::OwnedValue<Result>>(detail::CoreCalls::home(*core));
  // Where the creation fails by its time limit, or does not even begin.
  created.on_done_light([value](const Future<void>& ended) {
    if (const auto error = ended.error()) value->fail(error);
  });
  auto kept = std::make_shared<typename Body::Arguments>(std::move(arguments));
  detail::CoreCalls::call_here(
      *core, function, going, Body::first(*core, *kept), std::move(pending), [&](std::uint64_t call) {
        return Task([core, &function, kept, value, call] {
          Created::make(
              *core, kept, value,
              [core, call] {
                detail::CoreCalls::complete_here(
                    *core, call, [](PendingCall& waiting) { static_cast<PendingResult<void>&>(waiting).set({}, nullptr); });
              },
              [core, &function, call](const std::exception_ptr& error) {
                const auto thrown = detail::CoreCalls::thrown_here(*core, function, error);
                detail::CoreCalls::complete_here(*core, call, [&](PendingCall& waiting) { waiting.fail(thrown); });
              });
        });
      });
  return detail::CoreCalls::owner_handle(core, id, std::move(value));
}

}  // namespace weft::rpc
