// SPDX-License-Identifier: Apache-2.0
// Bodies of calls that need a reference: a method on the value of an RRef, and a constructor whose
// value an RRef keeps. call/body.h says what a body is.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <weft/base/export.h>
#include <weft/engine/call/body.h>
#include <weft/engine/rref/references.h>

namespace weft::rref::detail {

// These bodies are built from the same parts as FunctionBody.
using namespace call::detail;

// A function's parameters behind the value that it is called on.
template <class F, class M>
struct MethodShape : ShapeOf<F> {
  static constexpr bool takes_value =
      false;           // a static member that has nothing to do with the value
  using Value = void;  // as which parameter it comes
};
template <class First, class R, class... P>
struct MemberShape : Shape<R, void, P...> {
  static constexpr bool takes_value = true;
  using Value = First;
};
template <class F, class M>
requires std::is_member_function_pointer_v<F>
struct MethodShape<F, M> : ShapeOf<F> {
  static constexpr bool takes_value = true;
  using Value = void;
};
template <class First, class M>
concept RefersTo = std::is_reference_v<First> && std::is_base_of_v<std::remove_cvref_t<First>, M>;
template <class R, class First, class M, class... P>
requires RefersTo<First, M> ||
    (std::is_reference_v<First>&&
         std::is_same_v<std::remove_cvref_t<First>, M>)struct MethodShape<R (*)(First, P...), M>
    : MemberShape<First, R, P...> {
};
template <class R, class First, class M, class... P>
requires RefersTo<First, M> ||
    (std::is_reference_v<First>&& std::is_same_v<std::remove_cvref_t<First>, M>)struct MethodShape<
        R (*)(First, P...) noexcept, M> : MemberShape<First, R, P...> {
};

template <class Tuple>
struct WithId;
template <class... A>
struct WithId<std::tuple<A...>> {
  using Type = std::tuple<Target, A...>;
};
// Overloads may differ in const alone: of a const member function it is that of an RRef<const M>,
// which there never is; a function's first parameter, which takes the value, is told as it is.
template <class F, class R, class M, class Value, class Tuple>
struct MethodSignature;
template <class F, class R, class M, class... A>
struct MethodSignature<F, R, M, void, std::tuple<A...>> {
  static constexpr bool is_const =
      std::is_member_function_pointer_v<F> && std::is_invocable_v<F, const M&, A...>;
  using Type = R(RRef<std::conditional_t<is_const, const M, M>>, A...);
};
template <class F, class R, class M, class Value, class... A>
struct MethodSignature<F, R, M, Value, std::tuple<A...>> {
  using Type = R(RRef<M>, Value, A...);
};

// On the value of an RRef<M> that is owned here, once it has been created. The first argument is
// that.
template <auto F, class M>
struct MethodBody {
  using Shape = MethodShape<std::remove_const_t<decltype(F)>, M>;
  using Arguments = typename WithId<typename Shape::Arguments>::Type;
  using Result = typename Shape::Result;
  using Signature =
      typename MethodSignature<std::remove_const_t<decltype(F)>, Result, M, typename Shape::Value,
                               typename Shape::Arguments>::Type;

  static std::string name() { return call::name_in(typeid(Tag<F>)); }
  static std::vector<std::byte> value() { return bytes_of(F); }
  static std::optional<Future<void>> first(call::AgentCore& core, const void* arguments) {
    return wait_for<M>(references_of(core), std::get<0>(*static_cast<const Arguments*>(arguments)));
  }

  static void run(call::AgentCore&, const std::shared_ptr<void>& arguments,
                  const CompletionRef<Result>& to) {
    auto& given = *static_cast<Arguments*>(arguments.get());
    finish<Shape>(arguments, to, [&]() -> decltype(auto) {
      // The arguments keep the value alive. They are destroyed outside the turns of the loop.
      M& value = *std::static_pointer_cast<OwnedValue<M>>(std::get<0>(given).owned)->value();
      weft::detail::hand_over_referred(value);
      return std::apply(
          [&](const Target&, auto&... more) -> decltype(auto) {
            if constexpr (Shape::takes_value) {
              return std::invoke(F, value, std::move(more)...);
            } else {
              return std::invoke(F, std::move(more)...);
            }
          },
          given);
    });
  }
};

// Stores a call's result, or its error, as the value of an RRef. Completes the creation first, so
// that calls that wait for the value are answered after its creation.
template <class R>
class StoreResult final : public call::detail::Completion<R> {
 public:
  StoreResult(std::shared_ptr<call::AgentCore> core, const call::Function& function,
              std::shared_ptr<OwnedValue<R>> value, CompletionRef<void> creation)
      : core_(std::move(core)),
        function_(function),
        value_(std::move(value)),
        creation_(std::move(creation)) {}
  void succeed(weft::detail::Stored<R> value,
               DeviceWorkRef work) override {  // of an R that can be moved
    if constexpr (std::is_void_v<R>) {
      keep(nullptr, std::move(work));
    } else if constexpr (std::is_move_constructible_v<R>) {
      keep(std::make_shared<R>(std::move(value)), std::move(work));
    }
  }
  void keep(std::shared_ptr<R> value, DeviceWorkRef work) {
    auto all = weft::detail::join(std::move(work), enqueued(*core_));
    creation_->succeed({}, nullptr);
    value_->set(std::move(value), std::move(all));
  }
  void fail(const std::exception_ptr& error) override {
    creation_->fail(error);
    value_->fail(thrown_by(*core_, function_, error));
  }

 private:
  const std::shared_ptr<call::AgentCore> core_;
  const call::Function& function_;
  const std::shared_ptr<OwnedValue<R>> value_;
  const CompletionRef<void> creation_;
};

// An M made in place.
template <class M, class... A>
struct ConstructorBody : StartsAtOnce {
  using Arguments = std::tuple<A...>;
  using Result = M;
  using Signature = M(A...);

  static std::string name() { return "constructor of " + call::spelled(typeid(M)); }
  static std::vector<std::byte> value() { return {}; }

  // It is created only, never called: `to` is a StoreResult.
  static void run(call::AgentCore&, const std::shared_ptr<void>& arguments,
                  const CompletionRef<Result>& to) {
    try {
      auto made = std::apply([](auto&... more) { return std::make_shared<M>(std::move(more)...); },
                             *static_cast<Arguments*>(arguments.get()));
      static_cast<StoreResult<M>&>(*to).keep(std::move(made), nullptr);
    } catch (...) {
      to->fail(std::current_exception());
    }
  }
};

// Finds why the method F cannot be called on an M with any arguments; for a void M, why the
// function F cannot be called.
template <auto F, class M>
consteval auto refusal_of_exposed() {
  return std::conditional_t<std::is_void_v<M>, ShapeOf<std::remove_const_t<decltype(F)>>,
                            MethodShape<std::remove_const_t<decltype(F)>, M>>::refusal();
}

// Whether the first of a function's parameters is an M.
template <class M, class Arguments>
constexpr bool kBeginsWith = false;
template <class M, class... More>
constexpr bool kBeginsWith<M, std::tuple<M, More...>> = true;

// Why F cannot be called with A on the value of an RRef<M>.
template <auto F, class M, bool stays, class... A>
consteval auto refusal_of_method() {
  using Shape = MethodShape<std::remove_const_t<decltype(F)>, M>;
  if constexpr (std::is_member_function_pointer_v<decltype(F)> &&
                !std::is_base_of_v<typename Shape::Module, M> && !requires(M & value) {
                  *value;
                }) {  // a holder or pointer, which std::invoke follows
    return IsOfAnotherClass<decltype(F), M>();
  } else if constexpr (!Shape::takes_value && kBeginsWith<M, typename Shape::Arguments> &&
                       sizeof...(A) + 1 == std::tuple_size_v<typename Shape::Arguments>) {
    return TakesACopy<decltype(F), M>();
  } else {
    using Sent = std::conditional_t<stays, void, typename Shape::Result>;
    return first_of(Shape::refusal(), refusal_of_result<Sent>(),
                    refusal_of_arguments<MethodTakesAnotherNumber, A...>(
                        std::type_identity<typename Shape::Arguments>()));
  }
}

// Why no M can be made of A by remote<M>(…).
template <class M, class... A>
consteval auto refusal_of_constructor() {
  if constexpr (!std::is_constructible_v<M, A...>) {
    return HasNoConstructor<M, A...>();
  } else {
    return first_of(refusal_of_parameter<A>()...);
  }
}

template <auto F, class M, bool stays, class... A>
using RefusalOfMethod =
    decltype(about<Tag<F>>(refusal_of_method<NamingOf<F>::function, M, stays, A...>()));
template <auto F, class M>
using RefusalOfExposed = decltype(about<Tag<F>>(refusal_of_exposed<F, M>()));
template <class M, class... A>
using RefusalOfConstructor = decltype(about<M>(refusal_of_constructor<M, A...>()));

}  // namespace weft::rref::detail
