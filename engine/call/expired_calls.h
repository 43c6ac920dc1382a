// SPDX-License-Identifier: Apache-2.0
// Calls to other workers whose time is over and whose replies have not come. A reply may still
// bring references, which must end as all do, so the calls are remembered until then. Owned by the
// agent's outgoing calls. Usable from every thread; nothing here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/call/pending.h>

namespace weft::call {

class ExpiredCalls {
 public:
  // Remembers users' calls among these. Weft's own messages hold no references. If there are too
  // many calls, the oldest ones are only counted.
  void add(std::vector<PendingCalls::Taken> calls);
  struct Found {
    WaitingCall call;          // `pending` is null if the call is not remembered
    bool was_dropped = false;  // it may be one of those that are only counted
  };
  // A reply to that call has come from the worker of that rank by that connection.
  Found take(std::uint64_t id, int rank, std::uint64_t connection_number);
  // The connection to that worker has ended: no reply comes by it any more.
  std::vector<WaitingCall> take_all_of(int rank, std::uint64_t connection_number);
  std::map<std::uint64_t, WaitingCall> take_all();

 private:
  Mutex mutex_;
  std::map<std::uint64_t, WaitingCall> calls_ WEFT_GUARDED_BY(mutex_);  // by id
  // Number of calls that were dropped for lack of room, by the callee's rank and the connection.
  std::map<std::pair<int, std::uint64_t>, std::size_t> dropped_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
