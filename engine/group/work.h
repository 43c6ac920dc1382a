// SPDX-License-Identifier: Apache-2.0
// Work: the handle of one operation of a process group. Cheap to copy. The compiler warns of a call
// whose Work is dropped, since the operation is then not waited for. A program may still drop it,
// by static_cast<void>(…): the tensors stay pinned until the operation has passed, and an error
// that nobody looked at surfaces on the group (its next call throws it).
//
//   wait()         CUDA: the current stream waits and the host goes on; a later error surfaces on
//                  the group. CPU, and barriers: the host waits.
//   synchronize()  The host waits until the operation has ended.
//   query()        Polls.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <weft/base/export.h>
#include <weft/base/op.h>
#include <weft/engine/future/future.h>

namespace weft {

// The timeout that the group was made with.
constexpr std::chrono::milliseconds kGroupTimeout = std::chrono::milliseconds(-1);

namespace group {
class Operations;
struct Core;
struct WorkState;
}  // namespace group

class [[nodiscard(
    "the operation runs on; call wait() before its tensors are used, or keep the Work")]] WEFT_API
    Work {
 public:
  // An operation that is done, without error.
  Work() = default;

  // Throws the operation's Error (PeerLost, Timeout, Cancelled, …), every time.
  void wait();
  // Makes the stream wait. For CPU tensors the stream must be a CPU one, and the host waits.
  void wait(c10::Stream stream);
  // Throws Timeout if the timeout passes first; the operation goes on, and may be waited for again.
  // Throws Caller for a negative timeout.
  void synchronize(std::chrono::milliseconds timeout = kGroupTimeout);
  // True if the operation has ended. Does not block.
  bool query() const;
  // The sender's rank, after a recv; -1 for other operations and before it is done.
  int source_rank() const;
  // The operation's error; nullopt while it runs, and if it succeeded.
  std::optional<Error> error() const;
  // CPU: done when the operation has ended. CUDA: done at once, with the operation as the device
  // work that its value waits for (future.h).
  Future<void> future();
  // Calls `done` once, with the operation's error if it failed. It runs on the thread that ends the
  // operation, which is a backend's, or at once on this thread if the operation has ended. (If a
  // connection broke, the group first finds out which rank was lost, and calls `done` on the thread
  // that does.) future().then() changes threads twice and lets its function block; `done` must not:
  // it waits for nothing, calls neither this group nor another that shares its backend, and is
  // short. Logs an exception of `done`. The error counts as seen. Throws Caller for an empty
  // function, and for an operation that was captured into a CUDA graph.
  void on_done_inline(std::function<void(const std::optional<Error>&)> done) const;

 private:
  friend class group::Operations;
  explicit Work(std::shared_ptr<group::WorkState> state) : state_(std::move(state)) {}
  std::shared_ptr<group::WorkState> state_;
};

}  // namespace weft
