// What a call can run: a function, a method on the value behind an RRef, a constructor. Each body says what its arguments
// and its result are, what it waits for, and how it runs; calls and creations (RRef) are made from bodies alike.
//
// run(core, arguments, done, fail) calls done(value, work) or fail(error) once, on any thread. The value is there once
// `work`, and what that thread's current streams hold, have run. make(…) is the same for a value that stays here:
// done(std::shared_ptr<Result>, work).
#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <weft/engine/rpc/function.h>
#include <weft/engine/rref/references.h>

namespace weft::rpc {

class AgentCore;

namespace detail {

using weft::detail::DeviceWorkRef;

rref::References& references_of(AgentCore& core);

// Runs `call` and hands on what it returns; a future's value when that comes. `kept` lives until then.
template <class S, class Kept, class Call, class Done, class Fail>
void finish(const Kept& kept, Call call, Done done, Fail fail) {
  try {
    if constexpr (S::deferred) {
      auto future = call();
      future.on_done_light([kept, done, fail](const auto& ended) mutable {
        if (const auto error = ended.error()) return fail(error);
        try {
          done(ended.value(), ended.device_work());
        } catch (...) {
          fail(std::current_exception());
        }
      });
    } else if constexpr (std::is_void_v<typename S::Result>) {
      call();
      done(std::monostate(), DeviceWorkRef());
    } else {
      done(call(), DeviceWorkRef());
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

// What stays here of a result: void keeps nothing.
template <class R>
std::shared_ptr<R> kept(weft::detail::Stored<R> value) {
  if constexpr (std::is_void_v<R>) {
    return nullptr;
  } else {
    return std::make_shared<R>(std::move(value));
  }
}

// Nothing to wait for.
struct StartsAtOnce {
  template <class Arguments>
  static std::optional<Future<void>> first(AgentCore&, const Arguments&) {
    return std::nullopt;
  }
};

template <auto F>
struct FunctionBody : StartsAtOnce {
  using Shape = ShapeOf<std::remove_const_t<decltype(F)>>;
  using Arguments = typename Shape::Arguments;
  using Result = typename Shape::Result;
  using Signature = typename Shape::Signature;
  static_assert(std::is_void_v<typename Shape::Module>,
                "this is a member function: call it through an RRef, rref.sync<&M::method>(…)");
  static_assert(Shape::valid);

  static std::string name() { return name_in(typeid(Tag<F>)); }
  static std::vector<std::byte> value() { return bytes_of(F); }

  template <class Done, class Fail>
  static void run(AgentCore&, const std::shared_ptr<Arguments>& arguments, Done done, Fail fail) {
    finish<Shape>(
        arguments, [&]() -> decltype(auto) { return std::apply(F, std::move(*arguments)); }, done, fail);
  }
  template <class Done, class Fail>
  static void make(AgentCore& core, const std::shared_ptr<Arguments>& arguments, Done done, Fail fail) {
    run(
        core, arguments,
        [done](weft::detail::Stored<Result> value, DeviceWorkRef work) {
          done(kept<Result>(std::move(value)), std::move(work));
        },
        fail);
  }
};

// A function's parameters behind the value that it is called on.
template <class F, class M>
struct MethodShape : ShapeOf<F> {
  static constexpr bool takes_value = false;  // a static member that has nothing to do with the value
};
template <class R, class... P>
struct MemberShape : Shape<R, void, P...> {
  static constexpr bool takes_value = true;
};
template <class F, class M>
requires std::is_member_function_pointer_v<F>
struct MethodShape<F, M> : ShapeOf<F> {
  static constexpr bool takes_value = true;
};
template <class First, class M>
concept RefersTo = std::is_reference_v<First> && std::is_base_of_v<std::remove_cvref_t<First>, M>;
template <class R, class First, class M, class... P>
requires RefersTo<First, M> ||
    (std::is_reference_v<First>&& std::is_same_v<std::remove_cvref_t<First>, M>)struct MethodShape<R (*)(First, P...), M>
    : MemberShape<R, P...> {
};
template <class R, class First, class M, class... P>
requires RefersTo<First, M> ||
    (std::is_reference_v<First>&&
         std::is_same_v<std::remove_cvref_t<First>, M>)struct MethodShape<R (*)(First, P...) noexcept, M>
    : MemberShape<R, P...> {
};

template <class Tuple>
struct WithId;
template <class... A>
struct WithId<std::tuple<A...>> {
  using Type = std::tuple<rref::Target, A...>;
};
template <class R, class M, class Tuple>
struct MethodSignature;
template <class R, class M, class... A>
struct MethodSignature<R, M, std::tuple<A...>> {
  using Type = R(RRef<M>, A...);
};

// On the value of an RRef<M> that is owned here, once it has been created. The first argument is that.
template <auto F, class M>
struct MethodBody {
  using Shape = MethodShape<std::remove_const_t<decltype(F)>, M>;
  using Arguments = typename WithId<typename Shape::Arguments>::Type;
  using Result = typename Shape::Result;
  using Signature = typename MethodSignature<Result, M, typename Shape::Arguments>::Type;
  static_assert(Shape::valid);

  static std::string name() { return name_in(typeid(Tag<F>)); }
  static std::vector<std::byte> value() { return bytes_of(F); }
  static std::optional<Future<void>> first(AgentCore& core, const Arguments& arguments) {
    return rref::wait_for<M>(references_of(core), std::get<0>(arguments));
  }

  template <class Done, class Fail>
  static void run(AgentCore&, const std::shared_ptr<Arguments>& arguments, Done done, Fail fail) {
    // Which the arguments keep; what has it ends outside the turns of the loop.
    M& value = *std::static_pointer_cast<rref::OwnedValue<M>>(std::get<0>(*arguments).owned)->value();
    weft::detail::hand_over_referred(value);
    finish<Shape>(
        arguments,
        [&]() -> decltype(auto) {
          return std::apply(
              [&](const rref::Target&, auto&... more) -> decltype(auto) {
                if constexpr (Shape::takes_value) {
                  return std::invoke(F, value, std::move(more)...);
                } else {
                  return std::invoke(F, std::move(more)...);
                }
              },
              *arguments);
        },
        done, fail);
  }
  template <class Done, class Fail>
  static void make(AgentCore& core, const std::shared_ptr<Arguments>& arguments, Done done, Fail fail) {
    run(
        core, arguments,
        [done](weft::detail::Stored<Result> value, DeviceWorkRef work) {
          done(kept<Result>(std::move(value)), std::move(work));
        },
        fail);
  }
};

// An M made in place.
template <class M, class... A>
struct ConstructorBody : StartsAtOnce {
  using Arguments = std::tuple<A...>;
  using Result = M;
  using Signature = M(A...);
  static_assert(std::is_constructible_v<M, A...>, "M has no constructor that takes these arguments");
  static_assert((check_parameter<A>() && ...));

  static std::string name() { return "constructor of " + spelled(typeid(M)); }
  static std::vector<std::byte> value() { return {}; }

  template <class Done, class Fail>
  static void make(AgentCore&, const std::shared_ptr<Arguments>& arguments, Done done, Fail fail) {
    std::shared_ptr<M> made;
    try {
      made = std::apply([](auto&... more) { return std::make_shared<M>(std::move(more)...); }, *arguments);
    } catch (...) {
      return fail(std::current_exception());
    }
    done(std::move(made), DeviceWorkRef());
  }
};

}  // namespace detail
}  // namespace weft::rpc
