// SPDX-License-Identifier: Apache-2.0
// Future<T>: a value that arrives later. Promise is the side that sets it. Copies share one state;
// usable from every thread. Semantics of torch.futures.Future, as typed C++: then() makes a new
// future, on_done() only observes, get() blocks. The first error wins.
//
// Continuations run on the thread that completes the future, or on a thread of its executor that
// may block. They run one after the other, in the order of their registration; at once if the
// future is done and no earlier one is left. They may issue calls and wait: while one waits for a
// future, another thread runs those after it. If a continuation completes another future, that
// future's continuations run inside of it; if many are nested, they run after it, or when it waits,
// so chains may have any length. co_await resumes as a continuation.
//
// A value may hold tensors in CUDA memory that are still being written: the future is done once the
// writing is enqueued on the streams that are current where the value is set (as in
// torch.futures.Future with devices). get() and wait() make the current stream wait, not the host.
// then() calls its function with a stream of libtorch's pool current, which waits first.
#pragma once

#include <chrono>
#include <concepts>
#include <coroutine>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/export.h>
#include <weft/base/task.h>
#include <weft/engine/future/continuation.h>
#include <weft/engine/future/coroutine.h>
#include <weft/engine/future/executor.h>
#include <weft/engine/future/future_state.h>
#include <weft/engine/future/refusal.h>

namespace weft {

// As a timeout: none.
constexpr std::chrono::milliseconds kNoTimeout = std::chrono::milliseconds::max();

template <class T>
class Future;
template <class T>
class Promise;

namespace detail {

// Sets the promise to a copy of the value. An exception of the copying becomes its error.
template <class T>
void set_to_copy(const Promise<T>& promise, const FutureState<T>& state);

}  // namespace detail

template <class T>
class Future {
 public:
  // The type of the value.
  using value_type = T;
  // The promise of a coroutine that returns this future.
  using promise_type = detail::Coroutine<T>;

  // Without a state. Only assignment and destruction are allowed; all else is a Caller error.
  Future() = default;

  // Returns a future that is done already.
  template <class U = T>
  requires(!std::is_void_v<U>) static Future ready(U value) {
    if constexpr (std::is_convertible_v<U, T>) {
      Future future(std::make_shared<detail::FutureState<T>>());
      future.state_->set_on_streams(std::move(value));
      return future;
    } else {
      static_assert(detail::kNever<U>,
                    "the value of a Future<T> is a T, and this cannot be converted to one");
      std::terminate();
    }
  }
  // Returns a future without a value that is done already.
  static Future ready() requires std::is_void_v<T> {
    Future future(std::make_shared<detail::FutureState<T>>());
    future.state_->set({});
    return future;
  }
  // Throws Caller for a null pointer.
  static Future failed(std::exception_ptr error) {
    Future future(std::make_shared<detail::FutureState<T>>());
    future.state_->set_error(std::move(error));
    return future;
  }

  // Blocks until done. Returns the value (a copy, so that every copy of the future can) or throws
  // the error.
  T get() const {
    if constexpr (decltype(detail::refusal_of_sharing<T>())::accept()) {
      state().wait_until(Deadline::never());
      state().take();
      if constexpr (!std::is_void_v<T>) {
        if (state().device_work()) detail::hand_over(state().value());
        return state().value();
      }
    } else {
      std::terminate();
    }
  }
  // Blocks until done. Throws Timeout if the timeout passes first, and the future's error, every
  // time.
  void wait(std::chrono::milliseconds timeout = kNoTimeout) const {
    if (!state().wait_until(timeout == kNoTimeout ? Deadline::never() : Deadline::in(timeout))) {
      detail::throw_wait_timeout(typeid(T), timeout);
    }
    state().take();
  }
  // True if there is a value or an error. Does not block.
  bool done() const { return state().done(); }
  // True if there is an error. Does not block.
  bool failed() const { return state().failed(); }

  // Returns a future of the result of `function`, which is called with this future (and sees
  // errors) if it can be, else with the value (and an error skips it). An exception of `function`
  // becomes the error; a future that it returns is flattened. An empty std::function is a Caller
  // error.
  template <class F>
  Future<typename detail::Flat<detail::Given<F, T>>::Type> then(F function) const {
    if constexpr (decltype(detail::refusal_of_continuation<F, T>())::accept()) {
      return continued(std::move(function));
    } else {
      std::terminate();
    }
  }

  // Calls function(Future<T>) or function() when done; or function(T), unless the future has
  // failed. Logs an exception of `function`. An empty std::function is a Caller error.
  template <class F>
  void on_done(F function) const {
    if constexpr (decltype(detail::refusal_of_look<F, T>())::accept()) {
      detail::require_function(function);
      state().on_done([self = *this, function = std::move(function)]() mutable {
        try {
          if constexpr (std::is_invocable_v<F&, Future<T>>) {
            function(Future(self));
          } else if constexpr (std::is_invocable_v<F&>) {
            function();
          } else if (!self.failed()) {
            function(self.get());
          }
        } catch (...) {
          detail::log_lost_exception();
        }
      });
    }
  }

  // For Weft's own use.
  // Completes the promise with this future's value or error, once known. Logs it if the promise has
  // been set by then.
  void forward_to(Promise<T> promise) const {
    // Without an executor, the promise's continuations run inside of this one and may block.
    const bool light = promise.future().executor() != nullptr;
    state().on_done(
        [self = *this, promise]() mutable {
          if (const auto error = self.state().error()) return promise.set_error(error);
          detail::set_to_copy(promise, self.state());
        },
        light);
  }
  // Like get(), for the only copy of this future: moves out a value that cannot be copied.
  T get_own() const {
    if constexpr (std::is_void_v<T> || std::is_copy_constructible_v<T>) {
      return get();
    } else {
      wait();
      if (state().device_work()) detail::hand_over(state().value());
      return state().taken();
    }
  }
  // Like forward_to(), for the only copy of this future.
  void move_to(const Promise<T>& promise) const {
    if constexpr (std::is_void_v<T> || std::is_copy_constructible_v<T>) {
      forward_to(promise);
    } else {
      on_done_light([promise](const Future& ended) {
        if (const auto error = ended.error()) return promise.set_error(error);
        promise.set_with(ended.device_work(), ended.state().taken());
      });
    }
  }
  // Like on_done(), for Weft's own continuations, which neither block nor throw: they run on any
  // thread that completes the future.
  template <class F>
  void on_done_light(F function) const {
    state().on_done([self = *this, function = std::move(function)]() mutable { function(self); },
                    /*light=*/true);
  }
  const std::shared_ptr<detail::Executor>& executor() const { return state().executor(); }
  // The value, once done. Makes no stream wait for it.
  const detail::Stored<T>& value() const { return state().value(); }
  // The work that is still enqueued for the value, once done.
  detail::DeviceWorkRef device_work() const { return state().device_work(); }

  // For Weft's own use: called by co_await.
  bool await_ready() const { return done(); }
  void await_suspend(std::coroutine_handle<> handle) const {
    state().on_done(detail::Resumption(handle));
  }
  T await_resume() const { return get(); }

  // The error; null before the future is done, and if it has a value.
  std::exception_ptr error() const { return state().error(); }
  // For Weft's own use.
  // Identifies this future in Executor::drive(): a thread that blocks on it passes this as
  // `awaited`.
  const void* awaited() const { return static_cast<const detail::FutureCore*>(state_.get()); }

 private:
  friend class Promise<T>;
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}

  template <class F>
  auto continued(F function) const {
    detail::require_function(function);
    constexpr bool takes_future = std::is_invocable_v<F&, Future<T>>;
    using Raw = detail::Given<F, T>;
    using R = typename detail::Flat<Raw>::Type;
    Promise<R> promise(state().executor() ? state().executor() : detail::current_executor());
    Future<R> result = promise.future();
    state().on_done([self = *this, promise, function = std::move(function)]() mutable {
      try {
        if constexpr (!takes_future) {
          if (const auto error = self.state().error()) return promise.set_error(error);
        }
        auto call = [&]() -> decltype(auto) {
          if constexpr (takes_future) {
            return function(Future(self));
          } else if constexpr (std::is_void_v<T>) {
            return function();
          } else {
            if (self.state().device_work()) detail::hand_over(self.state().value());
            return function(T(self.state().value()));
          }
        };
        const auto work = self.state().device_work();
        if constexpr (detail::IsFuture<Raw>::value) {
          std::optional<Raw> inner;
          detail::run_after(work, [&] { inner.emplace(call()); });
          inner->forward_to(promise);
        } else if constexpr (std::is_void_v<R>) {
          promise.set_with(detail::run_after(work, call), {});
        } else {
          std::optional<R> made;
          detail::DeviceWorkRef own;  // may be on devices that `work` does not cover
          auto enqueued = detail::run_after(work, [&] {
            made.emplace(call());
            own = detail::enqueued_for(*made);
          });
          promise.set_with(detail::join(std::move(enqueued), std::move(own)), std::move(*made));
        }
      } catch (...) {
        promise.set_error(std::current_exception());
      }
    });
    return result;
  }

  detail::FutureState<T>& state() const {
    if (!state_) detail::throw_no_state();
    return *state_;
  }

  std::shared_ptr<detail::FutureState<T>> state_;
};

// The setting side. Copies share the future. If the last copy is destroyed without a value, the
// future fails with Cancelled, so that nobody waits for ever.
template <class T>
class Promise {
 public:
  // Makes a promise with a future of its own.
  Promise() : Promise(detail::current_executor()) {}
  // For Weft's own use: a thread that blocks on the future drives this executor's loop; may be
  // null.
  explicit Promise(std::shared_ptr<detail::Executor> executor)
      : owner_(std::make_shared<Owner>(std::move(executor))) {}

  // The future that this promise completes.
  Future<T> future() const { return Future<T>(state()); }

  // set() and set_error() throw Caller if either was called before.
  template <class U = T>
  requires(!std::is_void_v<T>) void set(U&& value) const {
    state()->set_on_streams(T(std::forward<U>(value)));
  }
  // Completes a future without a value.
  void set() const requires std::is_void_v<T> { state()->set({}); }

  // For Weft's own use: sets a value that is ready when `work` has run on its devices.
  void set_with(detail::DeviceWorkRef work, detail::Stored<T> value) const {
    state()->set(std::move(value), std::move(work));
  }

  // Completes the future with an error.
  template <std::derived_from<Error> E = Error>
  void set_error(const E& error) const {
    state()->set_error(std::make_exception_ptr(error));
  }
  // Throws Caller for a null pointer and leaves the future as it is.
  void set_error(std::exception_ptr error) const { state()->set_error(std::move(error)); }

 private:
  struct Owner {
    explicit Owner(std::shared_ptr<detail::Executor> executor)
        : state(std::make_shared<detail::FutureState<T>>(std::move(executor))) {}
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    std::shared_ptr<detail::FutureState<T>> state;
    ~Owner() {
      if (!state->done()) {
        state->set_error(std::make_exception_ptr(
            Error(Blame::Cancelled, "the promise was dropped without a value")));
      }
    }
  };
  const std::shared_ptr<detail::FutureState<T>>& state() const {
    if (!owner_) detail::throw_no_promise();
    return owner_->state;
  }

  std::shared_ptr<Owner> owner_;
};

template <>
struct detail::Coroutine<void> : detail::CoroutineBase<void> {
  void return_void() { result.emplace(); }
};

namespace detail {
template <class T>
void set_to_copy(const Promise<T>& promise, const FutureState<T>& state) {
  std::optional<Stored<T>> copy;
  try {
    copy.emplace(state.value());
  } catch (...) {
    return promise.set_error(std::current_exception());
  }
  promise.set_with(state.device_work(), std::move(*copy));
}
}  // namespace detail

}  // namespace weft
