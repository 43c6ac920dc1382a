// SPDX-License-Identifier: Apache-2.0
// when_all: a future that is done when all of the given futures are.
#pragma once

#include <cstddef>
#include <exception>
#include <initializer_list>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/future/future.h>

namespace weft {

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

// All values, in order. Done when all are, or at once with the first error.
template <class T>
Future<std::vector<T>> when_all(std::vector<Future<T>> futures) requires(!std::is_void_v<T>) {
  struct Gathered {
    explicit Gathered(std::size_t count) : values(count), missing(count) {}
    Mutex mutex;
    std::vector<std::optional<T>> values WEFT_GUARDED_BY(mutex);
    std::vector<detail::DeviceWorkRef> works WEFT_GUARDED_BY(mutex);
    std::size_t missing WEFT_GUARDED_BY(mutex);
    bool ended WEFT_GUARDED_BY(mutex) = false;
  };
  if (futures.empty()) return Future<std::vector<T>>::ready({});
  auto gathered = std::make_shared<Gathered>(futures.size());
  Promise<std::vector<T>> promise(detail::executor_of(futures));
  auto result = promise.future();
  for (std::size_t i = 0; i < futures.size(); ++i) {
    futures[i].on_done_light([gathered, promise, i](const Future<T>& future) {
      auto error = future.error();
      UniqueLock lock(gathered->mutex);
      if (gathered->ended) return;
      if (!error) {
        try {
          gathered->values[i].emplace(future.value());
        } catch (...) {
          error = std::current_exception();
        }
      }
      if (!error) {
        gathered->works.push_back(future.device_work());
        if (--gathered->missing > 0) return;
      }
      gathered->ended = true;
      std::vector<std::optional<T>> all;
      if (!error) all.swap(gathered->values);
      auto works = std::move(gathered->works);
      lock.unlock();
      if (error) return promise.set_error(error);
      std::vector<T> values;
      values.reserve(all.size());
      for (auto& value : all) values.push_back(std::move(*value));
      promise.set_with(detail::join(std::move(works)), std::move(values));
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
