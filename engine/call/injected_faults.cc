// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <utility>

#include <weft/engine/call/core.h>
#include <weft/engine/call/injected_faults.h>

namespace weft::call {

bool InjectedFaults::pass(MessageKind kind, std::function<void()> send) {
  if (refuses(kind)) return false;
  if (faults_.drop.contains(kind)) return true;
  if (const auto found = faults_.delay.find(kind); found != faults_.delay.end()) {
    delay(kind, found->second, std::move(send));
  } else {
    send();
  }
  return true;
}

bool InjectedFaults::refuses(MessageKind kind) {
  const auto found = faults_.fail_first.find(kind);
  if (found == faults_.fail_first.end()) return false;
  MutexLock lock(mutex_);
  if (refused_[kind] >= found->second) return false;
  ++refused_[kind];
  return true;
}

void InjectedFaults::delay(MessageKind kind, std::chrono::milliseconds pause,
                           std::function<void()> send) {
  std::shared_ptr<void> on_its_way;
  // This may be the verdict on a shutdown. A worker that leaves waits until it is sent, as for
  // every reply.
  if (kind == MessageKind::Shutdown) {
    core_.incoming_calls().count_replies(+1);
    on_its_way = {nullptr, [weak = core_.weak_from_this()](void*) {
                    if (const auto core = weak.lock()) core->incoming_calls().count_replies(-1);
                  }};
  }
  core_.pauses().after(pause,
                       Task([send = std::move(send), kept = std::move(on_its_way)] { send(); }));
}

}  // namespace weft::call
