// SPDX-License-Identifier: Apache-2.0
// Calls whose result stays at the worker that ran them, as the value of an RRef: the entry in this
// process's table, the calling side and the serving side. call/calls.h has the same for calls whose
// result goes back.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include <weft/base/export.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/rref/body.h>
#include <weft/engine/rref/references.h>

namespace weft::rref {
namespace detail {

WEFT_API std::shared_ptr<Handle> owner_handle(const std::shared_ptr<call::AgentCore>& core, Id id,
                                              std::shared_ptr<Owned> owned);
WEFT_API std::shared_ptr<Handle> user_handle(const std::shared_ptr<call::AgentCore>& core, Id id,
                                             ForkId fork, const call::Member& owner,
                                             const Future<void>& created, const Origin& origin);
// Tells the owner of a value that its creation has failed here: others may wait for it.
WEFT_API void will_not_come(const std::shared_ptr<call::AgentCore>& core, int owner, Id id,
                            const std::exception_ptr& why);

// The arguments of a creation: the RRef's id, the caller's fork, and the body's.
using CreationArguments = std::tuple<Id, ForkId, msgpack::object>;

template <class R>
void serve_creation(const std::shared_ptr<call::IncomingCall>& call, Id id, ForkId fork,
                    std::shared_ptr<void> arguments, First first, Run<R> run) {
  const auto value = rref::references_of(*call->core())
                         .values()
                         .template adopt<R>(id, fork, call->state().worker_generation());
  call->on_refused([value](const std::exception_ptr& error) { value->fail(error); });
  std::optional<Future<void>> waits_for;
  try {
    if (first != nullptr) waits_for = first(*call->core(), arguments.get());
  } catch (...) {  // others may wait for it already
    value->fail(std::current_exception());
    throw;
  }
  call->start(waits_for, Task([call, arguments = std::move(arguments), value, run] {
                run(*call->core(), arguments,
                    std::make_shared<StoreResult<R>>(call->core(), call->function(), value,
                                                     std::make_shared<SendReply<void>>(call)));
              }));
}

// A call whose result stays.
template <class Body>
struct Created {
  static void serve(const std::shared_ptr<call::IncomingCall>& call,
                    const msgpack::object& object) {
    using Arguments = typename Body::Arguments;
    const auto [id, fork, packed] = unpack_tuple<CreationArguments>(object);
    serve_creation<typename Body::Result>(
        call, id, fork, std::make_shared<Arguments>(unpack_tuple<Arguments>(packed)), Body::first,
        &Body::run);
  }

  inline static const call::Function& entered =
      *call::enter(entry(Body::name(), typeid(typename Body::Signature), /*stays=*/true,
                         Body::value(), &Created::serve));
};

// Receives the end of a creation on this worker itself. It does not wait for work that is enqueued
// for the value: users of the value do.
WEFT_API CompletionRef<void> ends_here(const std::shared_ptr<call::AgentCore>& core,
                                       const call::Function& function, std::uint64_t id);

WEFT_API std::shared_ptr<Handle> create_there(const std::shared_ptr<call::AgentCore>& core,
                                              const call::Function& function,
                                              const call::CallOptions& options,
                                              const Packed& packed);

template <class R>
std::shared_ptr<Handle> create_here(const std::shared_ptr<call::AgentCore>& core,
                                    const call::Function& function,
                                    const call::CallOptions& options,
                                    const std::shared_ptr<void>& arguments, First first,
                                    Run<R> run) {
  const Id id = references_of(*core).next_id();
  Promise<void> promise(CoreCalls::executor(*core));
  auto value = std::make_shared<OwnedValue<R>>(CoreCalls::executor(*core), id);
  // Where the creation fails by its time limit, or does not even begin.
  promise.future().on_done_light([value](const Future<void>& ended) {
    if (const auto error = ended.error()) value->fail(error);
  });
  CoreCalls::call_here(
      *core, function, options, first != nullptr ? first(*core, arguments.get()) : std::nullopt,
      std::make_unique<call::PendingResult<void>>(std::move(promise)), [&](std::uint64_t call) {
        return Task([core, arguments, value, run, &function, call] {
          run(*core, arguments,
              std::make_shared<StoreResult<R>>(core, function, value,
                                               ends_here(core, function, call)));
        });
      });
  return owner_handle(core, id, std::move(value));
}

}  // namespace detail

// A call whose result stays where it was made; returns at once.
template <class Body>
std::shared_ptr<Handle> create(const std::shared_ptr<call::AgentCore>& core,
                               call::CallOptions options, typename Body::Arguments arguments) {
  using Arguments = typename Body::Arguments;
  const call::Function& function = detail::shown(detail::Created<Body>::entered, arguments);
  options.kind = rpc::MessageKind::Create;
  if (!detail::CoreCalls::is_self(*core, options.to.rank))
    return detail::create_there(core, function, options, {&arguments, &detail::pack_as<Arguments>});
  return detail::create_here<typename Body::Result>(
      core, function, options, std::make_shared<Arguments>(std::move(arguments)), Body::first,
      &Body::run);
}

}  // namespace weft::rref
