// SPDX-License-Identifier: Apache-2.0
// The calls that fetch and copy the value of an RRef, the reasons why a value cannot be copied, and
// the futures of calls on a value. RRef's templates use them; programs do not.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <weft/engine/call/calls.h>
#include <weft/engine/rref/creation.h>
#include <weft/engine/rref/references.h>

namespace weft {

template <class T>
class RRef;

}  // namespace weft

namespace weft::rref::detail {

// Sends a copy of the value to the caller.
template <class T>
struct FetchBody {
  using Arguments = std::tuple<Target>;
  using Result = T;
  using Signature = T(RRef<T>);

  static std::string name() { return "weft::RRef::fetch"; }
  static std::vector<std::byte> value() { return {}; }
  static std::optional<Future<void>> first(call::AgentCore& core, const void* arguments) {
    return wait_for<T>(rref::references_of(core),
                       std::get<0>(*static_cast<const Arguments*>(arguments)));
  }
  static void run(call::AgentCore&, const std::shared_ptr<void>& arguments,
                  const call::detail::CompletionRef<T>& to) {
    try {
      const Target& target = std::get<0>(*static_cast<const Arguments*>(arguments.get()));
      const auto value = std::static_pointer_cast<OwnedValue<T>>(target.owned)->value();
      if constexpr (std::is_void_v<T>) {
        to->succeed({}, nullptr);
      } else {
        weft::detail::hand_over_referred(*value);
        to->succeed(T(*value), nullptr);
      }
    } catch (...) {
      to->fail(std::current_exception());
    }
  }
};

// Stores the copy of a value on the worker that will own it.
template <class T>
struct ArrivedCopyBody : call::detail::StartsAtOnce {
  using Arguments = std::tuple<Id, ForkId, T>;
  using Result = void;
  using Signature = void(RRef<T>, T);

  static std::string name() { return "weft::RRef::copy"; }
  static std::vector<std::byte> value() { return {}; }
  static void run(call::AgentCore& core, const std::shared_ptr<void>& arguments,
                  const call::detail::CompletionRef<void>& to) {
    std::shared_ptr<OwnedValue<T>> owned;
    try {
      auto& [id, fork, copy] = *static_cast<Arguments*>(arguments.get());
      const int holder = rank_in(fork);
      if (rank_in(id) != holder || call::detail::CoreCalls::is_self(core, holder)) {
        throw Error(Blame::Caller, "a copy with the ids " + to_text(id) + " and " + to_text(fork) +
                                       " does not name one other worker as its holder");
      }
      References& references = rref::references_of(core);
      const bool is_announced = references.values().has_fork(id, fork);
      owned = references.values().adopt<T>(id, fork, call::made_by(fork));
      // The holder may have died, and then it would not end the fork.
      if (!is_announced) call::detail::CoreCalls::look_after(core, holder);
      owned->set(std::make_shared<T>(std::move(copy)), call::detail::enqueued(core));
    } catch (...) {
      if (owned) owned->fail(std::current_exception());
      return to->fail(std::current_exception());
    }
    to->succeed({}, nullptr);  // last: others wait for the value, nobody for this reply
  }
};

// Makes a value's owner send a copy to another worker. Ends when the copy has arrived.
template <class T>
struct CopyBody {
  // The two integers are the rank and generation of the worker that gets the copy.
  using Arguments = std::tuple<Target, std::int32_t, std::int32_t, Id, ForkId>;
  using Result = call::Outcome;  // an error keeps its blame
  using Signature = call::Outcome(RRef<T>, int);

  static std::string name() { return "weft::RRef::copy_to"; }
  static std::vector<std::byte> value() { return {}; }
  static std::optional<Future<void>> first(call::AgentCore& core, const void* arguments) {
    return wait_for<T>(rref::references_of(core),
                       std::get<0>(*static_cast<const Arguments*>(arguments)));
  }
  static void run(call::AgentCore&, const std::shared_ptr<void>& arguments,
                  const call::detail::CompletionRef<call::Outcome>& asker) {
    const auto end = [asker](const std::exception_ptr& error) {
      asker->succeed(call::outcome_of(error), nullptr);
    };
    try {
      const auto& [target, to, generation, id, fork] =
          *static_cast<const Arguments*>(arguments.get());
      const auto value = std::static_pointer_cast<OwnedValue<T>>(target.owned)->value();
      weft::detail::hand_over_referred(*value);
      const call::CallOptions options{{to, generation},
                                      call::detail::CoreCalls::time_left(),
                                      rpc::MessageKind::Create,
                                      /*on_loop=*/true};
      call::issue<ArrivedCopyBody<T>>(call::detail::CoreCalls::current_core("copy_to()"), options,
                                      {id, fork, T(*value)})
          .on_done_light([end](const Future<void>& ended) { end(ended.error()); });
    } catch (...) {
      end(std::current_exception());
    }
  }
};

// Called on a value to wait for it. WEFT_API, like every template that is called remotely:
// libweft.so and the program must have one address for it.
template <class T>
WEFT_API void exists(const T&) {}

template <auto F, class T>
using ResultOf =
    typename MethodShape<std::remove_const_t<decltype(call::detail::NamingOf<F>::function)>,
                         T>::Result;

// Completes with the call's result or, if that comes first, the error that there will be no value.
template <class R>
Future<R> unless_not_created(const std::shared_ptr<call::AgentCore>& core,
                             const std::shared_ptr<Handle>& handle, Future<R> called) {
  if (!handle->created() || (handle->created()->done() && !handle->created()->failed()))
    return called;
  auto over = std::make_shared<std::atomic<bool>>(false);
  Promise<R> promise(call::detail::CoreCalls::executor(*core));
  auto result = promise.future();
  handle->created()->on_done_light([over, promise, handle](const Future<void>& created) {
    if (!created.failed() || over->exchange(true)) return;
    try {
      handle->require_created();
    } catch (...) {
      promise.set_error(std::current_exception());
    }
  });
  called.on_done_light([over, promise](const Future<R>& ended) {
    if (!over->exchange(true)) ended.move_to(promise);
  });
  return result;
}

// Keeps the reference until the call on its value has ended: before the call arrives, nothing else
// may keep the value.
template <class R>
Future<R> until_answered(const Future<R>& called, std::shared_ptr<Handle> handle) {
  called.on_done_light([kept = std::move(handle)](const Future<R>&) {});
  return called;
}

// The reason why a copy of an RRef<T>'s value cannot be sent.
template <class... About>
struct CannotBeCopied : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "to_here(), fetch() and copy_to() send a copy of the RRef's value, which cannot "
                  "be copied: call a method "
                  "on it where it is, with rref.sync<&M::method>(…)");
    return false;
  }
};
template <class T>
consteval auto refusal_of_copy() {
  if constexpr (std::is_void_v<T> || std::is_copy_constructible_v<T>) {
    return call::detail::RefusalOfResult<T>();
  } else {
    return weft::detail::first_of(call::detail::RefusalOfResult<T>(), CannotBeCopied<T>());
  }
}
template <class T>
using RefusalOfCopy = decltype(refusal_of_copy<T>());

}  // namespace weft::rref::detail
