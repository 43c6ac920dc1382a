// Waiting for several calls without keeping their futures: torch.distributed.rpc's _wait_all.
//
//   const auto calls = rpc::wait_all([&] { for (int rank = 0; rank < 4; ++rank)
//   agent.async<&train>(rank, epoch); });
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/future/future.h>

namespace weft::rpc {

// Runs the function, then waits until every call has ended that it issued with async<>() on this
// thread; those of remote<>() are not waited for. Returns how many. Throws what the function threw,
// else the first error of the calls in the order of their issue; all have ended then as well.
// Inside the function another wait_all() is one of its own.
WEFT_API std::size_t wait_all(const std::function<void()>& function);

namespace detail {

// While it lives, what this thread issues is others' business: a wait_all() around it does not
// count that.
class WEFT_API Untracked {
 public:
  Untracked();
  ~Untracked();
  Untracked(const Untracked&) = delete;
  Untracked& operator=(const Untracked&) = delete;

 private:
  std::vector<Future<void>>* before_;
};

// Whether this thread is in a wait_all(), and what that waits for.
WEFT_API bool is_tracking();
WEFT_API void track(Future<void> end);

template <class T>
Future<T> tracked(Future<T> call) {
  if (is_tracking()) track(weft::detail::end_of(call));
  return call;
}

}  // namespace detail
}  // namespace weft::rpc
