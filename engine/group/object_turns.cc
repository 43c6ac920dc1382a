// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <weft/engine/future/thread_executor.h>
#include <weft/engine/group/object_turns.h>

namespace weft::group {

std::unique_lock<std::mutex> ObjectTurns::take(bool is_send, int peer, int tag) {
  std::mutex* turn = nullptr;
  {
    MutexLock lock(mutex_);
    turn = &turns_[{is_send, peer, tag}];
  }
  std::unique_lock<std::mutex> taken(*turn, std::try_to_lock);
  if (taken) return taken;
  // As in Work's waits: another thread of the executor goes on meanwhile.
  const auto execution_context = weft::detail::current_executor();
  weft::detail::Executor* const here = weft::detail::thread_executor();
  weft::detail::Executor* const executor = here != nullptr ? here : execution_context.get();
  if (executor == nullptr) {
    taken.lock();
  } else {
    executor->block([&] { taken.lock(); });
  }
  return taken;
}

}  // namespace weft::group
