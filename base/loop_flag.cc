#include <weft/base/log.h>
#include <weft/base/loop_flag.h>

namespace weft {

bool LoopFlag::synchronize(Deadline deadline) const noexcept {
  if (query()) return true;
  if (const auto loop = loop_.lock()) {
    if (loop->inside()) {
      log::error("a handler blocks on an operation that only its own loop can end; use Op::on_ended or EventLoop::when");
      return false;
    }
    // Raised outside the loop, by a thread that handles another's message, it has to tell who drives that.
    if (!recalls_.exchange(true)) {
      Task recall([weak = loop_] {
        const auto driven = weak.lock();
        if (driven && !driven->inside()) driven->recall();
      });
      on_passed(recall);
    }
    if (loop->drive([this] { return query(); }, deadline)) return true;
    if (deadline.passed()) return query();
  }
  return HostFlag::synchronize(deadline);  // the loop has ended, or does: whoever it dropped raises the flag
}

}  // namespace weft
