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
    // Who raises the flag raises it first and then looks at this: one of the two sees the other.
    is_driven_for_.store(true, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (loop->drive([this] { return query(); }, deadline)) return true;
    if (deadline.passed()) return query();
  }
  return HostFlag::synchronize(
      deadline);  // the loop has ended, or does: whoever it dropped raises the flag
}

void LoopFlag::raised() const noexcept {
  if (!is_driven_for_.load(std::memory_order_seq_cst)) return;
  if (const auto driven = loop_.lock(); driven && !driven->inside()) driven->recall();
}

}  // namespace weft
