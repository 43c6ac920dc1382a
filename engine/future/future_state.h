// SPDX-License-Identifier: Apache-2.0
// The state that a Future and its Promise share, and the errors that they throw. For future.h.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/base/task.h>
#include <weft/engine/future/executor.h>
#include <weft/engine/tensor/device_work.h>

namespace weft::detail {

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
  bool any_left() const WEFT_REQUIRES(mutex_) { return next_ < continuations_.size(); }

  const std::shared_ptr<Executor> executor_;  // null if no thread needs to drive a loop
  mutable Mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int drivers_ WEFT_GUARDED_BY(mutex_) = 0;  // threads that block in the executor's drive()
  std::atomic<bool> done_{false};
  std::exception_ptr error_ WEFT_GUARDED_BY(mutex_);
  DeviceWorkRef work_ WEFT_GUARDED_BY(mutex_);
  std::vector<Continuation> continuations_ WEFT_GUARDED_BY(mutex_);
  // Index in continuations_ of the first that has not begun.
  std::size_t next_ WEFT_GUARDED_BY(mutex_) = 0;
  bool in_turn_ WEFT_GUARDED_BY(mutex_) = false;  // done, and a thread runs continuations_ or will
  std::thread::id runner_ WEFT_GUARDED_BY(mutex_);  // that thread, once it has begun
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

[[noreturn]] WEFT_API void throw_wait_timeout(const std::type_info& value,
                                              std::chrono::milliseconds timeout);
[[noreturn]] WEFT_API void throw_no_state();
[[noreturn]] WEFT_API void throw_no_promise();
[[noreturn]] WEFT_API void throw_no_function();
template <class F>
void require_function(const F& function) {
  if constexpr (requires { static_cast<bool>(function == nullptr); }) {
    if (function == nullptr) throw_no_function();
  }
}
// Logs the exception in flight, which a continuation has thrown and nobody can catch.
WEFT_API void log_lost_exception() noexcept;

}  // namespace weft::detail
