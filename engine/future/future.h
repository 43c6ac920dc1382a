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

#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <coroutine>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/export.h>
#include <weft/base/task.h>
#include <weft/engine/future/executor.h>
#include <weft/engine/future/refusal.h>
#include <weft/engine/tensor/device_work.h>

namespace weft {

// As a timeout: none.
constexpr std::chrono::milliseconds kNoTimeout = std::chrono::milliseconds::max();

template <class T>
class Future;
template <class T>
class Promise;

namespace detail {

template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

[[noreturn]] WEFT_API void throw_no_error();

// The state that all futures share, independent of the type of their value.
class WEFT_API FutureCore : public std::enable_shared_from_this<FutureCore> {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  bool failed() const;
  // Returns false if the deadline passed first. Throws Caller if blocking could never end
  // (Executor::drive).
  bool wait_until(Deadline deadline) const;
  // Runs the task when the future is done; at once if it is done already. A task that is not light
  // may block: it runs outside the turns of the executor's loop, after those registered before it,
  // in the present execution context of this thread.
  void on_done(Task task, bool light = false);
  const std::shared_ptr<Executor>& executor() const { return executor_; }
  std::exception_ptr error() const;
  void rethrow_if_failed() const;
  // The work on devices that the value still waits for, once done; null for none.
  DeviceWorkRef device_work() const;
  // Requires done(). Makes the current streams wait for the value; throws the future's error.
  void take() const;

 protected:
  explicit FutureCore(std::shared_ptr<Executor> executor) : executor_(std::move(executor)) {}
  ~FutureCore() = default;
  // Throws Caller if it was completed before. Runs `store` under mutex_.
  void complete(std::exception_ptr error, DeviceWorkRef work, const std::function<void()>& store);

 private:
  struct Continuation {
    Task task;
    bool light = false;
  };
  class InOrder;
  class Turn;
  void run_in_order();
  void drop_continuations() noexcept;
  bool any_left() const { return next_ < continuations_.size(); }  // requires mutex_

  const std::shared_ptr<Executor> executor_;  // null if no thread needs to drive a loop
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int drivers_ = 0;  // threads that block in the executor's drive(); guarded by mutex_
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  DeviceWorkRef work_;
  std::vector<Continuation> continuations_;
  std::size_t next_ = 0;    // index in continuations_ of the first that has not begun
  bool in_turn_ = false;    // done, and a thread runs continuations_ or will
  std::thread::id runner_;  // that thread, once it has begun
};

template <class T>
class FutureState : public FutureCore {
 public:
  explicit FutureState(std::shared_ptr<Executor> executor = nullptr)
      : FutureCore(std::move(executor)) {}
  void set(Stored<T> value, DeviceWorkRef work = nullptr) {
    complete(nullptr, std::move(work), [&] { value_.emplace(std::move(value)); });
  }
  // Sets a value whose tensors are written by work that is enqueued on the current streams.
  void set_on_streams(Stored<T> value) {
    auto work = enqueued_for(value);
    set(std::move(value), std::move(work));
  }
  void set_error(std::exception_ptr error) {
    if (!error) throw_no_error();  // it would have neither a value nor an error
    complete(std::move(error), nullptr, [] {});
  }
  const Stored<T>& value() const { return *value_; }
  Stored<T> taken() { return std::move(*value_); }

 private:
  std::optional<Stored<T>> value_;
};

template <class... About>
struct CannotShare : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "futures share their value, and this value cannot be copied: get it at once with "
                  "sync<&f>(…), or leave it on its worker with remote<&f>(…)");
    return false;
  }
};
template <class... About>
struct ContinuesNothing : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "a continuation of a Future<void> takes the Future, or nothing");
    return false;
  }
};
template <class... About>
struct ContinuesAnotherValue : Refusal {
  static constexpr bool accept() {
    static_assert(
        kNever<About...>,
        "a continuation takes the Future, or its value, and this one takes another type: write "
        "then([](Future<T> future) …) or then([](T value) …)");
    return false;
  }
};
template <class... About>
struct LooksAtAnotherValue : Refusal {
  static constexpr bool accept() {
    static_assert(kNever<About...>,
                  "the function given to on_done() takes the Future, or its value, or nothing");
    return false;
  }
};
template <class T>
consteval auto refusal_of_sharing() {
  if constexpr (std::is_void_v<T> || std::is_copy_constructible_v<T>) {
    return Fine();
  } else {
    return CannotShare<T>();
  }
}
// The reason why an F cannot continue a Future<T>, or Fine.
template <class F, class T>
consteval auto refusal_of_continuation() {
  if constexpr (std::is_invocable_v<F&, Future<T>>) {
    return Fine();
  } else if constexpr (std::is_void_v<T>) {
    return std::conditional_t<std::is_invocable_v<F&>, Fine, ContinuesNothing<F>>();
  } else if constexpr (std::is_invocable_v<F&, T>) {
    return refusal_of_sharing<T>();
  } else {
    return ContinuesAnotherValue<F, T>();
  }
}
// The reason why an F cannot be called when a Future<T> is done, or Fine.
template <class F, class T>
consteval auto refusal_of_look() {
  if constexpr (std::is_invocable_v<F&, Future<T>> || std::is_invocable_v<F&>) {
    return Fine();
  } else if constexpr (std::is_void_v<T>) {
    return LooksAtAnotherValue<F>();
  } else {
    return first_of(
        std::conditional_t<std::is_invocable_v<F&, T>, Fine, LooksAtAnotherValue<F, T>>(),
        refusal_of_sharing<T>());
  }
}
// The result type of an F that continues a Future<T>.
template <class F, class T>
consteval auto type_of_continuation() {
  if constexpr (std::is_invocable_v<F&, Future<T>>) {
    return std::type_identity<std::remove_cvref_t<std::invoke_result_t<F&, Future<T>>>>();
  } else if constexpr (std::is_void_v<T>) {
    if constexpr (std::is_invocable_v<F&>) {
      return std::type_identity<std::remove_cvref_t<std::invoke_result_t<F&>>>();
    } else {
      return std::type_identity<Refused>();
    }
  } else if constexpr (std::is_invocable_v<F&, T>) {
    return std::type_identity<std::remove_cvref_t<std::invoke_result_t<F&, T>>>();
  } else {
    return std::type_identity<Refused>();
  }
}
template <class F, class T>
using Given = typename decltype(type_of_continuation<F, T>())::type;

// Sets the promise to a copy of the value. An exception of the copying becomes its error.
template <class T>
void set_to_copy(const Promise<T>& promise, const FutureState<T>& state);

template <class T>
struct IsFuture : std::false_type {};
template <class T>
struct IsFuture<Future<T>> : std::true_type {};

// Future<Future<T>> is never made: a continuation that returns a future is flattened.
template <class R>
struct Flat {
  using Type = R;
};
template <class T>
struct Flat<Future<T>> {
  using Type = T;
};

[[noreturn]] WEFT_API void throw_wait_timeout(const std::type_info& value,
                                              std::chrono::milliseconds timeout);
[[noreturn]] WEFT_API void throw_no_state();
[[noreturn]] WEFT_API void throw_no_function();
template <class F>
void require_function(const F& function) {
  if constexpr (requires { static_cast<bool>(function == nullptr); }) {
    if (function == nullptr) throw_no_function();
  }
}
// Logs the exception in flight, which a continuation has thrown and nobody can catch.
WEFT_API void log_lost_exception() noexcept;

// Resumes a coroutine. If it is destroyed without having done so, it destroys the coroutine, whose
// promise then fails with Cancelled.
class Resumption {
 public:
  explicit Resumption(std::coroutine_handle<> handle) : handle_(handle) {}
  ~Resumption() {
    if (handle_) handle_.destroy();
  }
  Resumption(Resumption&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Resumption(const Resumption&) = delete;
  Resumption& operator=(const Resumption&) = delete;
  Resumption& operator=(Resumption&&) = delete;
  void operator()() { std::exchange(handle_, nullptr).resume(); }

 private:
  std::coroutine_handle<> handle_;
};

// A function that returns Future<T> may be a coroutine. It starts at once, and co_return sets the
// value. Continuations see the value only after the coroutine's local variables are destroyed, so
// its locks are released by then. Its arguments are destroyed after that.
template <class T>
struct CoroutineBase {
  Promise<T> promise;
  std::optional<Stored<T>> result;
  // Of the streams that are current at co_return: stream guards are local variables too.
  DeviceWorkRef work;
  Future<T> get_return_object() { return promise.future(); }
  std::suspend_never initial_suspend() noexcept { return {}; }
  std::suspend_never final_suspend() noexcept {
    if (!result) return {};
    try {
      promise.set_with(std::move(work), std::move(*result));
    } catch (...) {  // moving the value threw
      promise.set_error(std::current_exception());
    }
    return {};
  }
  void unhandled_exception() {
    result.reset();  // a local variable's destructor threw
    promise.set_error(std::current_exception());
  }
};
template <class T>
struct Coroutine : CoroutineBase<T> {
  template <class U = T>
  void return_value(U&& value) {
    this->result.emplace(T(std::forward<U>(value)));
    this->work = enqueued_for(*this->result);
  }
};
template <>
struct Coroutine<void>;

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

  // For Weft's own use: what co_await calls.
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
  Future<T> future() const { return Future<T>(owner_->state); }

  // set() and set_error() throw Caller if either was called before.
  template <class U = T>
  requires(!std::is_void_v<T>) void set(U&& value) const {
    owner_->state->set_on_streams(T(std::forward<U>(value)));
  }
  // Completes a future without a value.
  void set() const requires std::is_void_v<T> { owner_->state->set({}); }

  // For Weft's own use: sets a value that is ready when `work` has run on its devices.
  void set_with(detail::DeviceWorkRef work, detail::Stored<T> value) const {
    owner_->state->set(std::move(value), std::move(work));
  }

  // Completes the future with an error.
  template <std::derived_from<Error> E = Error>
  void set_error(const E& error) const {
    owner_->state->set_error(std::make_exception_ptr(error));
  }
  // Throws Caller for a null pointer and leaves the future as it is.
  void set_error(std::exception_ptr error) const { owner_->state->set_error(std::move(error)); }

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
  std::shared_ptr<Owner> owner_;
};

template <>
struct detail::Coroutine<void> : detail::CoroutineBase<void> {
  void return_void() { result.emplace(); }
};

namespace detail {
// The executor of the first future that has one. If a turn of a loop may complete one of them, the
// continuations of all must run outside of that turn.
template <class T>
std::shared_ptr<Executor> executor_of(const std::vector<Future<T>>& futures) {
  for (const auto& future : futures) {
    if (future.executor()) return future.executor();
  }
  return nullptr;
}
}  // namespace detail

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

// All values, in order. Done when all are, or at once with the first error.
template <class T>
Future<std::vector<T>> when_all(std::vector<Future<T>> futures) requires(!std::is_void_v<T>) {
  struct Gathered {
    std::mutex mutex;
    std::vector<std::optional<T>> values;
    detail::DeviceWorkRef work;
    std::size_t missing = 0;
    bool ended = false;
  };
  if (futures.empty()) return Future<std::vector<T>>::ready({});
  auto gathered = std::make_shared<Gathered>();
  gathered->values.resize(futures.size());
  gathered->missing = futures.size();
  Promise<std::vector<T>> promise(detail::executor_of(futures));
  auto result = promise.future();
  for (std::size_t i = 0; i < futures.size(); ++i) {
    futures[i].on_done_light([gathered, promise, i](const Future<T>& future) {
      auto error = future.error();
      std::unique_lock lock(gathered->mutex);
      if (gathered->ended) return;
      if (!error) {
        try {
          gathered->values[i].emplace(future.value());
        } catch (...) {
          error = std::current_exception();
        }
      }
      if (!error) {
        gathered->work = detail::join(gathered->work, future.device_work());
        if (--gathered->missing > 0) return;
      }
      gathered->ended = true;
      lock.unlock();
      if (error) return promise.set_error(error);
      std::vector<T> values;
      values.reserve(gathered->values.size());
      for (auto& value : gathered->values) values.push_back(std::move(*value));
      promise.set_with(gathered->work, std::move(values));
    });
  }
  return result;
}

namespace detail {
WEFT_API Future<void> when_all_done(std::vector<Future<void>> futures);

// A future that is done when the given one is, without its value.
template <class T>
Future<void> end_of(const Future<T>& future) {
  Promise<void> promise(future.executor());
  auto end = promise.future();
  future.on_done_light([promise](const Future<T>& one) {
    if (const auto error = one.error()) return promise.set_error(error);
    promise.set_with(one.device_work(), {});
  });
  return end;
}
}  // namespace detail

// The same for futures without a value.
inline Future<void> when_all(std::vector<Future<void>> futures) {
  return detail::when_all_done(std::move(futures));
}

// The same for a list in braces.
template <class T>
auto when_all(std::initializer_list<Future<T>> futures) {
  return when_all(std::vector<Future<T>>(futures));
}

// Futures of different types: a tuple of their values (std::monostate for void), or Future<void>
// when all are Future<void>.
template <class... T>
requires(sizeof...(T) > 0) auto when_all(Future<T>... futures) {
  std::vector<Future<void>> ends;
  (ends.push_back(detail::end_of(futures)), ...);
  auto all = detail::when_all_done(std::move(ends));
  if constexpr ((std::is_void_v<T> && ...)) {
    return all;
  } else {
    const auto value = [](const auto& future) {
      if constexpr (std::is_void_v<typename std::remove_cvref_t<decltype(future)>::value_type>) {
        return std::monostate();
      } else {
        return future.value();
      }
    };
    return all.then(
        [futures..., value] { return std::tuple<detail::Stored<T>...>(value(futures)...); });
  }
}

}  // namespace weft
