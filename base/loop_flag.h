// A flag that a loop's handlers raise. Who blocks on it turns that loop itself meanwhile: being
// woken by the loop's thread instead would cost 40 µs.
#pragma once

#include <atomic>
#include <memory>

#include <weft/base/event_loop.h>
#include <weft/base/fence.h>

namespace weft {

class LoopFlag final : public HostFlag {
 public:
  explicit LoopFlag(std::weak_ptr<EventLoop> loop) : loop_(std::move(loop)) {}

  // As HostFlag's where the loop is gone. False at once, with an error in the log, inside the
  // loop's own turn: only what comes after that turn can raise the flag.
  bool synchronize(Deadline deadline) const noexcept override;

 private:
  // Outside the loop, by a thread that handles another's message: tells who drives that.
  void raised() const noexcept override;

  std::weak_ptr<EventLoop> loop_;
  mutable std::atomic<bool> is_driven_for_{false};
};

}  // namespace weft
