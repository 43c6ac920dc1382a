// SPDX-License-Identifier: Apache-2.0
// A flag that a loop's handlers raise. A thread that blocks on it turns the loop itself meanwhile,
// because a wake-up by the loop's thread would cost 40 µs.
#pragma once

#include <atomic>
#include <memory>

#include <weft/base/event_loop.h>
#include <weft/base/fence.h>

namespace weft {

class LoopFlag final : public HostFlag {
 public:
  explicit LoopFlag(std::weak_ptr<EventLoop> loop) : loop_(std::move(loop)) {}

  // Like HostFlag's if the loop has been destroyed. Inside the loop's own turn it logs an error and
  // returns false at once, because only work after that turn can raise the flag.
  bool synchronize(Deadline deadline) const noexcept override;

 private:
  // If a thread outside the loop raises the flag (one that handles another loop's message), this
  // wakes the thread that drives the loop for it.
  void raised() const noexcept override;

  std::weak_ptr<EventLoop> loop_;
  mutable std::atomic<bool> is_driven_for_{false};
};

}  // namespace weft
