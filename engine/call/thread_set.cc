// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/call/thread_set.h>

namespace weft::call {

ThreadSet::~ThreadSet() {
  if (!last_.joinable()) return;
  // One of the pool's own threads has called stop() and was the last to leave. It may be the one
  // that destroys the pool.
  if (last_.get_id() == std::this_thread::get_id()) {
    last_.detach();
  } else {
    last_.join();
  }
}

void ThreadSet::start(Task work) {
  std::thread thread(std::move(work));
  threads_.emplace(thread.get_id(), std::move(thread));
}

std::thread ThreadSet::leave() {
  auto own = threads_.extract(std::this_thread::get_id());
  std::thread before = std::exchange(last_, std::move(own.mapped()));
  ended_.notify_all();
  return before;
}

void ThreadSet::wait(std::unique_lock<std::mutex>& lock, int threads) {
  ended_.wait(lock, [&] { return size() <= threads; });
}

std::thread ThreadSet::take_last() { return std::exchange(last_, std::thread()); }

}  // namespace weft::call
