// SPDX-License-Identifier: Apache-2.0
// RRef<T>: a reference to a T that lives on one worker, its owner. Any worker may hold one.
// References can be sent in calls, while the value stays with its owner until the last reference
// has ended. An RRef may be passed on and called before its value exists.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <ostream>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/wait_all.h>
#include <weft/engine/rref/copies.h>
#include <weft/engine/rref/creation.h>
#include <weft/engine/rref/references.h>

namespace weft {

namespace rref {

// Calls on the value of an RRef<T>. `Self` has the reference and the calls' time limit.
template <class T, class Self>
class Methods {
 public:
  // Runs a method of the value where the value lives, once it exists: &M::method, or a function
  // that takes M& first.
  template <auto F, class... A>
  auto sync(A&&... arguments) const  // static_cast<R (M::*)(P...)>(&M::f)
      -> detail::ResultOf<F, T> {
    if constexpr (detail::RefusalOfMethod<F, T, /*stays=*/false, A...>::accept()) {
      return issue<F>(std::forward<A>(arguments)...).get_own();
    } else {
      std::terminate();
    }
  }
  // Like sync(), at once: returns a future of the result.
  template <auto F, class... A>
  auto async(A&&... arguments) const  // static_cast<R (M::*)(P...)>(&M::f)
      -> Future<detail::ResultOf<F, T>> {
    if constexpr (detail::RefusalOfMethod<F, T, /*stays=*/false, A...>::accept()) {
      return call::detail::tracked(
          detail::until_answered(issue<F>(std::forward<A>(arguments)...), reference().handle()));
    } else {
      std::terminate();
    }
  }
  // Like sync(), at once: the result stays with the owner, and a reference to it is returned.
  template <auto F, class... A>
  auto remote(A&&... arguments) const  // static_cast<R (M::*)(P...)>(&M::f)
      -> RRef<detail::ResultOf<F, T>> {
    if constexpr (detail::RefusalOfMethod<F, T, /*stays=*/true, A...>::accept()) {
      using Naming = call::detail::NamingOf<F>;
      using Body = detail::MethodBody<Naming::function, T>;
      const auto core = reference().usable();
      auto made = rref::create<Body>(core, call_options(*core, Naming::on_loop),
                                     arguments_of<Body>(std::forward<A>(arguments)...));
      if (const auto& asked = made->created())
        static_cast<void>(detail::until_answered(*asked, reference().handle()));
      return RRef<typename Body::Result>(std::move(made));
    } else {
      std::terminate();
    }
  }

 private:
  template <auto F, class... A>
  auto issue(A&&... arguments) const {
    using Naming = call::detail::NamingOf<F>;
    using Body = detail::MethodBody<Naming::function, T>;
    const auto core = reference().usable();
    return detail::unless_not_created(
        core, reference().handle(),
        call::issue<Body>(core, call_options(*core, Naming::on_loop),
                          arguments_of<Body>(std::forward<A>(arguments)...)));
  }
  call::CallOptions call_options(call::AgentCore& core, bool on_loop) const {
    const auto limit =
        call::detail::CoreCalls::limit(core, static_cast<const Self&>(*this).call_limit());
    return {reference().handle()->to_owner(), limit, rpc::MessageKind::Call, on_loop};
  }
  template <class Body, class... A>
  typename Body::Arguments arguments_of(A&&... arguments) const {
    return typename Body::Arguments(reference().handle()->id(), std::forward<A>(arguments)...);
  }
  const RRef<T>& reference() const { return static_cast<const Self&>(*this).called(); }
};

// Calls on the value with their own time limit.
template <class T>
class Timed : public Methods<T, Timed<T>> {
 public:
  // For Weft's own use: programs call RRef::timeout().
  Timed(RRef<T> reference, std::optional<std::chrono::milliseconds> limit)
      : reference_(std::move(reference)), limit_(limit) {}

 private:
  friend class Methods<T, Timed<T>>;
  const RRef<T>& called() const { return reference_; }
  std::optional<std::chrono::milliseconds> call_limit() const { return limit_; }

  RRef<T> reference_;
  std::optional<std::chrono::milliseconds> limit_;
};

}  // namespace rref

namespace rref::detail {

// Whether the object of a std::shared_ptr<U> can be the value of an RRef<T>. If the pointer itself
// can, it is.
template <class U, class T>
constexpr bool kIsObjectOf = !std::is_void_v<T> && std::is_convertible_v<U*, T*> &&
                             !std::is_convertible_v<std::shared_ptr<U>, T>;
template <class Given, class T>
constexpr bool kPointsToA = false;
template <class U, class T>
constexpr bool kPointsToA<std::shared_ptr<U>, T> = kIsObjectOf<U, T>;

}  // namespace rref::detail

// Cheap to copy; all copies on one worker are one reference. Thread-safe.
template <class T>
class RRef : public rref::Methods<T, RRef<T>> {
 public:
  // The type of the value.
  using value_type = T;

  // An empty RRef: it can only be assigned and sent.
  RRef() = default;
  // Makes a value that this worker owns.
  template <class U = T>
  requires(!std::is_void_v<U>) RRef(const rpc::Agent& agent, std::type_identity_t<U> value)
      : RRef(own(call::detail::CoreCalls::of(agent), std::make_shared<U>(std::move(value)))) {}
  // The object itself, not a copy of it, is the value; its type may be derived from T. Throws
  // Caller for a null pointer.
  template <class U>
  requires(rref::detail::kIsObjectOf<U, T>) RRef(const rpc::Agent& agent, std::shared_ptr<U> value)
      : RRef(own(call::detail::CoreCalls::of(agent), std::shared_ptr<T>(std::move(value)))) {}
  // The same inside a called function, for the agent that runs it; throws Caller elsewhere.
  template <class U = T>
  requires(!std::is_void_v<U>) explicit RRef(std::type_identity_t<U> value)
      : RRef(own(call::detail::CoreCalls::current_core("RRef(value)"),
                 std::make_shared<U>(std::move(value)))) {}
  // For Weft's own use: reports a value of another type.
  template <class Given>
  requires(!std::is_void_v<T> && !std::is_convertible_v<Given, T> &&
           !rref::detail::kPointsToA<std::remove_cvref_t<Given>, T>)
      RRef(const rpc::Agent&, Given&&) {
    static_assert(weft::detail::kNever<Given>,
                  "the value of an RRef<T> is a T, or the object of a std::shared_ptr<T>, and this "
                  "cannot be converted to one");
  }
  // For Weft's own use.
  explicit RRef(std::shared_ptr<rref::Handle> handle) : handle_(std::move(handle)) {}

  // Returns a copy of the value, once it has been created. Throws CreationError, Timeout, PeerLost.
  // On the owner there is no time limit unless one is given.
  T to_here(std::chrono::milliseconds timeout = kAgentTimeout) const {
    if constexpr (rref::detail::RefusalOfCopy<T>::accept()) {
      return fetched(timeout).get();
    } else {
      std::terminate();
    }
  }
  // Like to_here(), without blocking. The reference may be dropped meanwhile, as with calls on the
  // value.
  Future<T> fetch(std::chrono::milliseconds timeout = kAgentTimeout) const {
    if constexpr (rref::detail::RefusalOfCopy<T>::accept()) {
      return rref::detail::until_answered(fetched(timeout), handle_);
    } else {
      std::terminate();
    }
  }
  // Copies the value to another worker, which owns the copy. The value's owner sends it there, in
  // one message, once the value exists. Returns at once; the copy can be used like any reference,
  // and calls on it wait until it has arrived. Changes of the value meanwhile may or may not be in
  // the copy, and must not run at the same time as the copying (as with to_here()). On the value's
  // owner itself the tensors of the copy share memory with the value, as with to_here(). If the
  // value cannot be copied or `to` cannot be reached, uses of the copy throw CreationError. Throws
  // Caller if `to` is not a worker, and CreationError if it is known that there is no value.
  RRef copy_to(const rpc::Destination& to) const {
    if constexpr (rref::detail::RefusalOfCopy<T>::accept()) {
      const auto core = usable();
      auto options = call::detail::CoreCalls::call_options(*core, to);
      rref::References& references = rref::references_of(*core);
      const rref::Id id = references.next_id();
      if (call::detail::CoreCalls::is_self(*core, options.to.rank)) {
        auto copy =
            std::make_shared<rref::OwnedValue<T>>(call::detail::CoreCalls::executor(*core), id);
        fetch(options.limit).on_done_light([copy, kept = handle_](const Future<T>& fetched) {
          try {
            if (const auto error = fetched.error()) std::rethrow_exception(error);
            copy->set(std::make_shared<T>(fetched.value()), fetched.device_work());
          } catch (...) {
            copy->fail(std::current_exception());
          }
        });
        return RRef(rref::detail::owner_handle(core, id, std::move(copy)));
      }
      const rref::ForkId fork = references.next_id();
      const call::Member receiver = call::detail::CoreCalls::member(*core, options.to);
      options.to = handle_->to_owner();
      options.kind = rpc::MessageKind::Create;
      const auto asked = call::issue<rref::detail::CopyBody<T>>(
          core, options, {handle_->id(), receiver.worker.rank, receiver.generation, id, fork});
      const auto made = rref::detail::unless_not_created(core, handle_, asked);
      return RRef(rref::expect_there(core, receiver, id, fork, asked, made, handle_, to.place()));
    } else {
      std::terminate();
    }
  }

  // Done when the value exists; fails with a CreationError if its creation has failed.
  Future<void> created() const {
    if (handle()->created()) return handle_->creation();
    if (is_owner()) return handle_->owned()->created();
    if constexpr (std::is_void_v<T>) {
      return fetch();
    } else {
      return this->template async<&rref::detail::exists<T>>();
    }
  }

  // The value itself, on its owner; blocks until it has been created. Throws Caller on other
  // workers.
  template <class U = T>
  requires(!std::is_void_v<U>) U& local_value() const {
    if (!handle()->is_owner()) {
      throw Error(Blame::Caller, "local_value() of RRef " + rref::to_text(handle_->id()) +
                                     " (fork " + rref::to_text(handle_->fork()) +
                                     ") asked for on rank " +
                                     std::to_string(call::detail::CoreCalls::self(*usable())) +
                                     ", which does not own it: its owner is " + describe(owner()) +
                                     "; use to_here(), or call a method on it");
    }
    return *std::static_pointer_cast<rref::OwnedValue<U>>(handle_->owned())->value();
  }
  // The worker on which the value lives.
  const rpc::WorkerInfo& owner() const { return handle()->owner(); }
  // True if this worker owns the value.
  bool is_owner() const { return handle()->is_owner(); }
  // True if the owner knows of this reference; always true on the owner.
  bool confirmed() const { return handle()->confirmed(); }
  // False for an empty RRef.
  explicit operator bool() const { return handle_ != nullptr; }

  // sync<&M::method>(…), async and remote, as inherited, with their own time limit.
  rref::Timed<T> timeout(std::chrono::milliseconds limit) const { return {*this, limit}; }

  // For Weft's own use.
  const std::shared_ptr<rref::Handle>& handle() const {
    if (!handle_)
      throw Error(Blame::Caller, "this RRef is empty: it was default-constructed or moved from");
    return handle_;
  }
  const std::shared_ptr<rref::Handle>& handle_or_null() const { return handle_; }
  // The agent, if the reference can be used. Throws Caller after shutdown, and CreationError.
  std::shared_ptr<call::AgentCore> usable() const {
    auto core = handle()->core();
    handle_->require_created();
    return core;
  }

 private:
  friend class rref::Methods<T, RRef<T>>;
  const RRef& called() const { return *this; }
  std::optional<std::chrono::milliseconds> call_limit() const { return std::nullopt; }

  template <class U>
  static std::shared_ptr<rref::Handle> own(const std::shared_ptr<call::AgentCore>& core,
                                           std::shared_ptr<U> value) {
    if (!value) throw Error(Blame::Caller, "an RRef of an object was given a null std::shared_ptr");
    const rref::Id id = rref::references_of(*core).next_id();
    auto owned =
        std::make_shared<rref::OwnedValue<U>>(call::detail::CoreCalls::executor(*core), id);
    owned->set(std::move(value), call::detail::enqueued(*core));
    return rref::detail::owner_handle(core, id, std::move(owned));
  }

  Future<T> fetched(std::chrono::milliseconds timeout) const {
    const auto core = usable();
    const auto limit = call::detail::CoreCalls::limit(*core, timeout);
    if (is_owner())
      return fetch_here(core, timeout == kAgentTimeout ? std::chrono::milliseconds(0) : limit);
    return rref::detail::unless_not_created(
        core, handle_,
        call::issue<rref::detail::FetchBody<T>>(
            core, {handle_->to_owner(), limit, rpc::MessageKind::Fetch, false}, {handle_->id()}));
  }
  // A limit of 0 means none.
  Future<T> fetch_here(const std::shared_ptr<call::AgentCore>& core,
                       std::chrono::milliseconds limit) const {
    auto owned = std::static_pointer_cast<rref::OwnedValue<T>>(handle_->owned());
    // The first caller of take() answers, and the timer holds no value.
    struct Answer {
      explicit Answer(const Promise<T>& given) : promise(given) {}
      Mutex mutex;
      std::optional<Promise<T>> promise WEFT_GUARDED_BY(mutex);
      std::optional<Promise<T>> take() {
        MutexLock lock(mutex);
        return std::exchange(promise, std::nullopt);
      }
    };
    const Promise<T> result_promise(call::detail::CoreCalls::executor(*core));
    auto result = result_promise.future();
    auto answer = std::make_shared<Answer>(result_promise);
    owned->created().on_done_light([answer, owned](const Future<void>& created) {
      const auto promise = answer->take();
      if (!promise) return;
      if (const auto error = created.error()) return promise->set_error(error);
      if constexpr (std::is_void_v<T>) {
        promise->set();
      } else {
        std::optional<T> copy;
        try {
          copy.emplace(*owned->made());
        } catch (...) {  // the user's copy constructor has thrown
          return promise->set_error(std::current_exception());
        }
        promise->set_with(created.device_work(), std::move(*copy));
      }
    });
    if (limit.count() == 0 || result.done()) return result;
    const auto pause =
        call::detail::CoreCalls::after(*core, limit, Task([answer, limit, id = handle_->id()] {
          if (const auto promise = answer->take()) {
            promise->set_error({Blame::Timeout, "RRef " + rref::to_text(id) +
                                                    ", owned here, has no value after " +
                                                    weft::describe(limit)});
          }
        }));
    result.on_done_light([weak = std::weak_ptr(core), pause](const Future<T>&) {
      call::detail::CoreCalls::drop_pause(weak, pause);
    });
    return result;
  }

  std::shared_ptr<rref::Handle> handle_;
};

// "RRef (0, 3), fork (0, 4), of worker1 (rank 1)".
template <class T>
std::ostream& operator<<(std::ostream& out, const RRef<T>& reference) {
  return out << (reference ? describe(*reference.handle()) : "empty RRef");
}

namespace rref::detail {

template <class T>
void expose_value();

template <class P>
concept AreParameters = std::is_convertible_v<P, std::vector<at::Tensor>>;
template <class T>
concept HasParameters = requires(T& value) {
  { value.parameters() } -> AreParameters;
};
template <class T>
concept PointsToParameters = !HasParameters<T> && requires(T & value) {
  { value->parameters() } -> AreParameters;
  static_cast<bool>(value);
};

// Called on the owner, by remote_parameters(). Each parameter comes once, as in PyTorch's Python.
template <class T>
WEFT_API std::vector<RRef<at::Tensor>> parameters_of(T& value) {
  std::vector<at::Tensor> found;
  if constexpr (HasParameters<T>) {
    found = value.parameters();
  } else {
    if (!static_cast<bool>(value))
      throw Error(Blame::Caller, "remote_parameters: the value is no module, but null");
    found = value->parameters();
  }
  std::vector<RRef<at::Tensor>> references;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto is_same = [&](const at::Tensor& other) { return other.is_same(found[i]); };
    if (std::none_of(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(i), is_same))
      references.push_back(RRef<at::Tensor>(found[i]));
  }
  return references;
}

// Enters the functions of the types to which a T refers. Functions are named and not called, which
// is enough to enter them and does not recurse when types refer to each other.
template <class T>
concept HasWeftFields = requires(const T& value) {
  value.weft_fields();
};
template <class T>
struct Exposed {
  static void references() {
    if constexpr (HasWeftFields<T>) {
      static_cast<void>(&Exposed<decltype(std::declval<const T&>().weft_fields())>::references);
    }
  }
};
template <class V>
struct Exposed<RRef<V>> {
  static void references() { static_cast<void>(&expose_value<V>); }
};
template <class T, std::size_t elements>
struct Exposed<std::array<T, elements>> : Exposed<T> {};
template <template <class...> class C, class... T>
requires(!HasWeftFields<C<T...>>) struct Exposed<C<T...>> {
  static void references() {
    (static_cast<void>(&Exposed<std::remove_cvref_t<T>>::references), ...);
  }
};

// Enters the functions that holders of a reference, in any program, may call on a T that lives
// here.
template <class T>
void expose_value() {
  if constexpr (std::is_void_v<T>) {
    static_cast<void>(Called<FetchBody<T>>::entered.id);
  } else {
    static_cast<void>(Called<MethodBody<&exists<T>, T>>::entered.id);
    if constexpr (RefusalOfCopy<T>::fine) {
      static_cast<void>(Called<FetchBody<T>>::entered.id);
      static_cast<void>(Called<CopyBody<T>>::entered.id);
      static_cast<void>(Called<ArrivedCopyBody<T>>::entered.id);
    }
    if constexpr (HasParameters<T> || PointsToParameters<T>) {
      static_cast<void>(Called<MethodBody<&parameters_of<T>, T>>::entered.id);
      static_cast<void>(&expose_value<at::Tensor>);
    }
    static_cast<void>(&Exposed<T>::references);
  }
}

}  // namespace rref::detail

template <class T>
RRef(const rpc::Agent&, T) -> RRef<T>;
template <class T>
RRef(T) -> RRef<T>;

}  // namespace weft

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  template <class T>
  struct pack<weft::RRef<T>> {
    weft::codec::Packer& operator()(weft::codec::Packer& packer,
                                    const weft::RRef<T>& reference) const {
      auto* forks =
          static_cast<weft::rref::ForkWriter*>(weft::codec::Writer::current().references());
      if (forks == nullptr) {
        throw weft::Error(weft::Blame::Caller,
                          "an RRef can be sent only in calls: it cannot be encoded on its own");
      }
      static const std::uint64_t type = weft::call::hash_of(typeid(weft::RRef<T>).name());
      forks->pack(packer, reference.handle_or_null(), type);
      return packer;
    }
  };
  template <class T>
  struct convert<weft::RRef<T>> {
    const msgpack::object& operator()(const msgpack::object& object,
                                      weft::RRef<T>& reference) const {
      auto* forks =
          static_cast<weft::rref::ForkReader*>(weft::codec::Reader::current().references());
      if (forks == nullptr) {
        throw weft::Error(weft::Blame::Caller,
                          "an RRef can be sent only in calls: it cannot be decoded on its own");
      }
      static const std::uint64_t type = weft::call::hash_of(typeid(weft::RRef<T>).name());
      reference = weft::RRef<T>(
          forks->unpack(object, type, [](weft::rref::References& references, weft::rref::Id id) {
            return std::static_pointer_cast<weft::rref::Owned>(references.values().owned<T>(id));
          }));
      return object;
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
