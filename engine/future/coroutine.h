// SPDX-License-Identifier: Apache-2.0
// Coroutines that return a Future: their promise type, and how they are resumed. For future.h.
#pragma once

#include <coroutine>
#include <exception>
#include <optional>
#include <utility>

#include <weft/engine/future/future_state.h>

namespace weft {

template <class T>
class Future;
template <class T>
class Promise;

namespace detail {

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
  // The work on the streams that are current at co_return: stream guards are local variables too.
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
}  // namespace weft
