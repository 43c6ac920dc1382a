// SPDX-License-Identifier: Apache-2.0
#include <weft/base/mutex.h>
#include <weft/transport/fenced_queue.h>

namespace weft::transport {

void FencedQueue::run(Fence ready, Task start) {
  {
    MutexLock lock(mutex_);
    waiting_.push_back({std::move(ready), std::move(start)});
    if (draining_) return;  // the thread that drains the queue starts it
    draining_ = true;
  }
  drain();
}

void FencedQueue::drain() {
  for (;;) {
    Task start;
    std::deque<Waiting> dropped;
    // Released without mutex_, like `start` and `dropped`: it may be the last reference to the
    // loop.
    std::shared_ptr<EventLoop> loop;
    {
      MutexLock lock(mutex_);
      if (waiting_.empty()) {
        draining_ = false;
        return;
      }
      if (!waiting_.front().ready.query()) {
        // draining_ stays true: the queue moves on when this fence passes.
        if (loop = loop_.lock(); loop) {
          loop->when(waiting_.front().ready, [self = shared_from_this()] { self->drain(); });
        } else {
          dropped.swap(waiting_);
          draining_ = false;
        }
        return;
      }
      start = std::move(waiting_.front().start);
      waiting_.pop_front();
    }
    start();
  }
}

}  // namespace weft::transport
