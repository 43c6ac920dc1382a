// SPDX-License-Identifier: Apache-2.0
// Stores that ranks of the job keep. Once the ranks have joined, a group meets in a store that its
// first member keeps, over membership's connections: neither new_group nor split needs the job's
// store, whose host may be lost. The loss of the keeper ends the group in any case.
//
// Thread-safe. Calls block, and must not be made on the job's loop.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <weft/base/fence.h>
#include <weft/base/mutex.h>
#include <weft/engine/membership/membership.h>
#include <weft/engine/membership/store_keeper.h>
#include <weft/engine/store/store.h>

namespace weft::group {

// The Job owns it. Keeps what other ranks store here, and calls the stores that they keep.
class MemberStores : public std::enable_shared_from_this<MemberStores> {
 public:
  static std::shared_ptr<MemberStores> make(int rank, std::shared_ptr<Membership> membership);

  // A store that the rank `keeper` of the job, the first of a group, keeps for that group.
  // `timeout`: of calls.
  c10::intrusive_ptr<c10d::Store> at(int keeper, std::chrono::milliseconds timeout);

  // Asks the keeper and waits for its answer. Calls `interrupt` now and then, and passes its
  // exceptions on. Throws Timeout; PeerLost if the keeper is lost or has left. Errors call the
  // keeper rank 0.
  StoreMessage call(int keeper, StoreMessage request, Deadline deadline,
                    const std::function<void()>& interrupt);

 private:
  struct Asked : HostFlag {
    Mutex mutex;
    StoreMessage reply WEFT_GUARDED_BY(mutex);
  };
  MemberStores(int rank, const std::shared_ptr<Membership>& membership)
      : rank_(rank), membership_(membership) {}
  void on_frame(const Frame& frame);
  void send(int keeper, const StoreMessage& request);
  void answered(const StoreMessage& reply);

  const int rank_;
  const std::weak_ptr<Membership> membership_;
  StoreKeeper keeper_;
  std::atomic<std::uint64_t> last_{0};
  Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Asked>> asked_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::group
