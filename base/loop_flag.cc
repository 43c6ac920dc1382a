// SPDX-License-Identifier: Apache-2.0
#include <weft/base/log.h>
#include <weft/base/loop_flag.h>

namespace weft {

bool LoopFlag::synchronize(Deadline deadline) const noexcept {
  if (query()) return true;
  if (const auto loop = loop_.lock()) {
    if (loop->inside()) {
      log::error(
          "a handler blocks on an operation that only its own loop can end; use Op::on_ended or "
          "EventLoop::when");
      return false;
    }
    // raise() raises the flag first and then reads is_driven_for_, so either this thread sees the
    // flag or raise() sees this store.
    is_driven_for_.store(true, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (loop->drive([this] { return query(); }, deadline)) return true;
    if (deadline.passed()) return query();
  }
  // The loop has ended or is ending: the operations that it dropped raise the flag.
  return HostFlag::synchronize(deadline);
}

void LoopFlag::raised() const noexcept {
  if (!is_driven_for_.load(std::memory_order_seq_cst)) return;
  if (const auto driven = loop_.lock(); driven && !driven->inside()) driven->recall();
}

}  // namespace weft
