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
    if (loop->drive([this] { return query(); }, deadline)) return true;
    if (deadline.passed()) return query();
  }
  return HostFlag::synchronize(deadline);  // the loop has ended, or does: whoever it dropped raises the flag
}

}  // namespace weft
