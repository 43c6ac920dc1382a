// SPDX-License-Identifier: Apache-2.0
// An object travels as two messages, its size and its bytes. Threads of one rank that send to, or
// receive from, the same rank with the same tag take turns, so that the two messages of one object
// follow each other. The group's Core owns it. Thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include <weft/base/mutex.h>

namespace weft::group {

class ObjectTurns {
 public:
  // Blocks while another thread has the turn, which ends when the returned lock is destroyed.
  // `peer`: as the call names it, so transport::kAnySource too.
  std::unique_lock<std::mutex> take(bool is_send, int peer, int tag);

 private:
  Mutex mutex_;
  std::map<std::tuple<bool, int, int>, std::mutex> turns_ WEFT_GUARDED_BY(mutex_);  // never erased
};

}  // namespace weft::group
