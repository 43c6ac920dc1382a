// The result of every data call: (Slice, Pin, …, Fence ready) -> Op, noexcept. done() says when the
// bytes are there, or may be reused; error() says, once done() has passed, whether they are good. A
// failed Op still passes its fence, so no stream ever hangs on it. The Pin of the call is held
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
  // Done, without error.
  Op() = default;
  // Done, with an error.
  static Op failed(Error error);

  Fence done() const;
  // Meaningful once done() has passed; may be known earlier (a communicator that was aborted).
  std::optional<Error> error() const;
  // Who sent, for a receive from any source; -1 for other operations. Meaningful once done() has
  // passed.
  int source_rank() const;

  // Runs the task when the producer says how the operation ended, on that thread; at once if it
  // has. Where done() is an event that is a moment after it has passed, when a loop notices; the
  // task costs no polling of its own.
  void on_ended(Task task) const;
  // Whether the producer has said so. Asks no device.
  bool ended() const;
  // Whether this thread runs such tasks at the moment. It is a backend's then, and must not be made
  // to wait for operations.
  static bool ending();

 private:
  friend class Completion;
  struct State;
  explicit Op(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// Until the process ends: somebody may still write there, and cannot be stopped.
void keep_for_good(Pin memory) noexcept;

// The producer's side of one Op. The first of finish() and fail() decides; later calls do nothing.
// Copies share the Op.
class Completion {
 public:
  // done() is a flag that finish() and fail() raise.
  explicit Completion(Pin pin, std::shared_ptr<HostFlag> flag = std::make_shared<HostFlag>());
  // done() is given (a recorded event): finish() only releases the Pin, fail() records the error.
  Completion(Pin pin, Fence done);

  Op op() const;
  void set_source_rank(int rank) noexcept;
  bool finish() noexcept;
  bool fail(Error error) noexcept;
  // The Pin stays for good, however the operation ends: what works on the memory could not be
  // stopped.
  void keep_pin() noexcept;
  bool finished() const noexcept;

 private:
  std::shared_ptr<Op::State> state_;
};

}  // namespace weft
