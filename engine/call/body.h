// SPDX-License-Identifier: Apache-2.0
// Bodies: a body is the part of a call that runs. It names the types of its arguments and its
// result, a future that it may have to wait for, and how it runs. FunctionBody runs a function;
// rref/body.h has the bodies that run a method on the value behind an RRef, and a constructor.
// Calls and creations (rref/creation.h) are made from bodies.
//
// The code in this header is compiled for each function. It is kept small, because programs have
// many functions. Code that is compiled only for each result type is in calls.h. run(core,
// arguments, to) runs a body on its Arguments; `to` receives the result.
#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <weft/base/export.h>
#include <weft/engine/call/function.h>
#include <weft/engine/future/future.h>
#include <weft/engine/tensor/device_work.h>

namespace weft::call {

class AgentCore;

namespace detail {

using weft::detail::DeviceWorkRef;

// The work that this thread has enqueued on its current streams of the GPUs that calls use here;
// null if calls use no GPU.
WEFT_API DeviceWorkRef enqueued(AgentCore& core);
// Turns an exception that a function threw on this worker into the RemoteError that its callers
// see.
WEFT_API std::exception_ptr thrown_by(AgentCore& core, const Function& function,
                                      const std::exception_ptr& error);

// Receives the result of a call: one of its functions is called, once, on any thread. The value may
// be used once `work`, and the work on the calling thread's current streams, have run.
template <class R>
class Completion {
 public:
  Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;
  virtual ~Completion() = default;
  // An exception thrown here becomes the call's failure.
  virtual void succeed(weft::detail::Stored<R> value, DeviceWorkRef work) = 0;
  // The same for a value that its future keeps; requires a type that can be copied.
  virtual void succeed_with(const weft::detail::Stored<R>& value, DeviceWorkRef work) {
    if constexpr (std::is_copy_constructible_v<weft::detail::Stored<R>>)
      succeed(value, std::move(work));
  }
  virtual void fail(const std::exception_ptr& error) = 0;
};

template <class R>
using CompletionRef = std::shared_ptr<Completion<R>>;
template <class R>
using Run = void (*)(AgentCore& core, const std::shared_ptr<void>& arguments,
                     const CompletionRef<R>& to);

// Passes the result of a future to `to`, and keeps `kept` alive until then.
template <class R, class F>
void hand_on(const F& future, const std::shared_ptr<void>& kept, const CompletionRef<R>& to) {
  future.on_done_light([kept, to](const F& ended) {
    if (const auto error = ended.error()) return to->fail(error);
    try {
      if constexpr (std::is_void_v<R>) {
        to->succeed({}, ended.device_work());
      } else {
        to->succeed_with(ended.value(), ended.device_work());
      }
    } catch (...) {
      to->fail(std::current_exception());
    }
  });
}

// Runs `call` and passes its result to `to`; if that is a future, once it is done.
template <class S, class Call>
void finish(const std::shared_ptr<void>& kept, const CompletionRef<typename S::Result>& to,
            Call call) {
  try {
    if constexpr (S::deferred) {
      hand_on<typename S::Result>(call(), kept, to);
    } else if constexpr (std::is_void_v<typename S::Result>) {
      call();
      to->succeed({}, nullptr);
    } else {
      to->succeed(call(), nullptr);
    }
  } catch (...) {
    to->fail(std::current_exception());
  }
}

// Returns the future, if any, that a body waits for before it runs. A null pointer means that it
// waits for nothing.
using First = std::optional<Future<void>> (*)(AgentCore& core, const void* arguments);
struct StartsAtOnce {
  static constexpr First first = nullptr;
};

template <auto F>
struct FunctionBody : StartsAtOnce {
  using Shape = ShapeOf<std::remove_const_t<decltype(F)>>;
  using Arguments = typename Shape::Arguments;
  using Result = typename Shape::Result;
  using Signature = typename Shape::Signature;

  static std::string name() { return name_in(typeid(Tag<F>)); }
  static std::vector<std::byte> value() { return bytes_of(F); }

  static void run(AgentCore&, const std::shared_ptr<void>& arguments,
                  const CompletionRef<Result>& to) {
    finish<Shape>(arguments, to, [&]() -> decltype(auto) {
      return std::apply(F, std::move(*static_cast<Arguments*>(arguments.get())));
    });
  }
};

// Finds why an agent cannot call F with A…. With `stays`, the result is not sent.
template <auto F, bool stays, class... A>
consteval auto refusal_of_call() {
  using Shape = ShapeOf<std::remove_const_t<decltype(F)>>;
  if constexpr (!std::is_void_v<typename Shape::Module>) {
    return NeedsAnRRef<decltype(F)>();
  } else {
    using Sent = std::conditional_t<stays, void, typename Shape::Result>;
    return first_of(Shape::refusal(), refusal_of_result<Sent>(),
                    refusal_of_arguments<TakesAnotherNumber, A...>(
                        std::type_identity<typename Shape::Arguments>()));
  }
}

template <auto F, bool stays, class... A>
using RefusalOfCall =
    decltype(about<Tag<F>>(refusal_of_call<NamingOf<F>::function, stays, A...>()));
}  // namespace detail
}  // namespace weft::call
