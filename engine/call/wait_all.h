// SPDX-License-Identifier: Apache-2.0
// Waiting for several calls without keeping their futures: torch.distributed.rpc's _wait_all.
//
//   const auto calls = rpc::wait_all([&] {
//     for (int rank = 0; rank < 4; ++rank) agent.async<&train>(rank, epoch);
//   });
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/future/future.h>
#include <weft/engine/future/when_all.h>

namespace weft::rpc {

// Runs the function, then waits until every call that it issued with async<>() on this thread has
// ended; calls of remote<>() are not waited for. Returns the number of calls. If the function
// threw, throws its exception, else the first error of the calls in the order of their issue; then
// too all calls have ended. A wait_all() inside the function counts its own calls.
WEFT_API std::size_t wait_all(const std::function<void()>& function);

}  // namespace weft::rpc

namespace weft::call {
namespace detail {

// While it lives, a wait_all() around it does not count the calls that this thread issues: they are
// others'.
class WEFT_API Untracked {
 public:
  Untracked();
  ~Untracked();
  Untracked(const Untracked&) = delete;
  Untracked& operator=(const Untracked&) = delete;

 private:
  std::vector<Future<void>>* before_;
};

// Whether this thread is in a wait_all(). track() adds a call that it waits for.
WEFT_API bool is_tracking();
WEFT_API void track(Future<void> end);

template <class T>
Future<T> tracked(Future<T> call) {
  if (is_tracking()) track(weft::detail::end_of(call));
  return call;
}

}  // namespace detail
}  // namespace weft::call
