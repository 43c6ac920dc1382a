// SPDX-License-Identifier: Apache-2.0
// The result of every data call: (Slice, Pin, …, Fence ready) -> Op, noexcept. The fence done()
// passes when the bytes have arrived or may be reused; after that, error() says whether they are
// good. A failed Op also passes its fence, so no stream ever hangs on it. The call's Pin is held
// until done() has passed.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include <weft/base/error.h>
#include <weft/base/fence.h>
#include <weft/base/slice.h>
#include <weft/base/task.h>

namespace weft {

class Completion;

class Op {
 public:
  // An Op that is done, without error.
  Op() = default;
  // An Op that is done, with an error.
  static Op failed(Error error);

  Fence done() const;
  // Meaningful once done() has passed. It may be set earlier, for example if the communicator was
  // aborted.
  std::optional<Error> error() const;
  // The rank that sent, for a receive from any source; -1 for other operations. Meaningful once
  // done() has passed.
  int source_rank() const;

  // Runs the task when the producer reports how the operation ended, on the thread that reports it;
  // at once if the operation has ended. If done() is an event, the report follows shortly after the
  // event, when a loop notices it; the task adds no polling of its own.
  void on_ended(Task task) const;
  // True if the producer has reported the end. Queries no device.
  bool ended() const;
  // True if this thread is running such tasks. It then belongs to a backend and must not wait for
  // operations.
  static bool ending();

 private:
  friend class Completion;
  struct State;
  explicit Op(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// Keeps the memory until the process ends, because something that cannot be stopped may still write
// to it.
void keep_for_good(Pin memory) noexcept;

// The producer's side of one Op. The first finish() or fail() decides; later calls do nothing.
// Copies share the Op.
class Completion {
 public:
  // done() becomes a flag that finish() and fail() raise.
  explicit Completion(Pin pin, std::shared_ptr<HostFlag> flag = std::make_shared<HostFlag>());
  // done() becomes `done` (a recorded event): finish() only releases the Pin, fail() records the
  // error.
  Completion(Pin pin, Fence done);

  Op op() const;
  void set_source_rank(int rank) noexcept;
  bool finish() noexcept;
  bool fail(Error error) noexcept;
  // Keeps the Pin until the process ends, however the operation ends, for memory that something
  // still works on and cannot be stopped.
  void keep_pin() noexcept;
  bool finished() const noexcept;

 private:
  std::shared_ptr<Op::State> state_;
};

}  // namespace weft
