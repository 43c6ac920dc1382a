// SPDX-License-Identifier: Apache-2.0
// The values that one agent owns, with the forks through which workers hold them. A value is kept
// while any fork of it is known, or a handle of the owner's own lives; an entry may be made before
// the creation has come.
//
// Owned by the agent's references. Usable from every thread; nothing here blocks. Values end
// without the mutex, because a value may hold references, and not on the event loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <typeinfo>
#include <unordered_map>

#include <weft/base/event_loop.h>
#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/engine/rref/ended_ids.h>
#include <weft/engine/rref/handle.h>

namespace weft::call {
class AgentCore;
}

namespace weft::rref {

class WEFT_API Values {
 public:
  explicit Values(call::AgentCore& core) : core_(core) {}

  // The value of that id. If none is known, makes an entry for it: its creation may be behind this
  // message. Throws Caller if the value has another type.
  template <class T>
  std::shared_ptr<OwnedValue<T>> owned(Id id) {
    auto found =
        find_or_expect(id, [&] { return std::make_shared<OwnedValue<T>>(executor(), id); });
    if (found->type() != typeid(OwnedValue<T>))
      wrong_type(id, typeid(OwnedValue<T>), found->type());
    return std::static_pointer_cast<OwnedValue<T>>(found);
  }
  // The creation has come; from now on `holder` holds the fork.
  template <class T>
  std::shared_ptr<OwnedValue<T>> adopt(Id id, ForkId fork, const call::WorkerGeneration& holder) {
    auto found =
        arrive(id, fork, holder, [&] { return std::make_shared<OwnedValue<T>>(executor(), id); });
    if (found->type() != typeid(OwnedValue<T>))
      wrong_type(id, typeid(OwnedValue<T>), found->type());
    return std::static_pointer_cast<OwnedValue<T>>(found);
  }
  // From now on `holder` holds the fork, unless that has ended already. Idempotent. `owned` is null
  // if it is not known.
  void add_fork(Id id, ForkId fork, const call::WorkerGeneration& holder,
                const std::shared_ptr<Owned>& owned);
  // The worker that held or was to hold the fork does so no longer.
  void remove_fork(Id id, ForkId fork, int holder);
  // True if the fork is known, even if it has ended.
  bool has_fork(Id id, ForkId fork) const;
  // True if the fork is known and has not ended.
  bool holds(Id id, ForkId fork) const;
  // Notes that a fork has ended, or will never be.
  void end(ForkId fork);
  bool has_ended(ForkId fork) const;
  // Notes why no creation will come: calls that wait for the value fail. Does nothing if a creation
  // has come.
  void give_up(Id id, const std::exception_ptr& why);
  // Count the RRefs of the owner's own that refer to the value.
  void hold_here(Id id, const std::shared_ptr<Owned>& owned);
  void release_here(Id id);

  // True if the worker holds a fork, or is expected to create a value.
  bool concerns(int rank) const;
  // Ends the forks of lost workers; returns their number. Values that only a lost worker was to
  // create fail.
  std::size_t workers_lost(const std::function<bool(const call::WorkerGeneration&)>& is_lost);
  // Drops all values and fails calls that wait for them.
  void close();
  void count(rpc::DebugInfo& info) const;

 private:
  struct Entry {
    std::shared_ptr<Owned> owned;                    // null until a message tells its type
    std::map<ForkId, call::WorkerGeneration> forks;  // with their holders
    int here = 0;                                    // the owner's own handles
    bool arrived = false;            // the creation has come, or the value was made here
    std::exception_ptr given_up;     // why no creation will come
    EventLoop::Registration expiry;  // timer, while the creation is expected
    std::chrono::seconds patience{1};
    // True if another worker is to send the value, which may take its time: then the creator's own
    // fork is known before the creation.
    bool is_announced(Id id) const {
      return std::any_of(forks.begin(), forks.end(), [id](const auto& fork) {
        return fork.second.rank == rank_in(id) && rank_in(fork.first) == rank_in(id);
      });
    }
    bool is_expected() const { return !arrived && !given_up; }
    bool is_kept() const { return !forks.empty() || here > 0 || !(arrived || given_up); }
  };
  using Make = std::function<std::shared_ptr<Owned>()>;
  std::shared_ptr<Owned> find_or_expect(Id id, const Make& make);
  std::shared_ptr<Owned> arrive(Id id, ForkId fork, const call::WorkerGeneration& holder,
                                const Make& make);
  std::shared_ptr<weft::detail::Executor> executor() const;
  [[noreturn]] static void wrong_type(Id id, const std::type_info& wanted,
                                      const std::type_info& found);
  Entry take_if_unused(Id id) WEFT_REQUIRES(mutex_);
  void let_go(std::shared_ptr<Owned> value) WEFT_EXCLUDES(mutex_);
  // The reason why a creation will not come any more: the creator has left, and another worker has
  // its rank. Null if it may come.
  std::exception_ptr too_late(Id id) const WEFT_EXCLUDES(mutex_);
  void expect(Id id, Entry& entry) WEFT_REQUIRES(mutex_);
  void expire(Id id);

  call::AgentCore& core_;
  std::atomic<int> ending_{0};  // values that are being destroyed
  mutable Mutex mutex_;
  std::unordered_map<Id, Entry> entries_ WEFT_GUARDED_BY(mutex_);
  EndedIds ended_ WEFT_GUARDED_BY(mutex_);  // forks and values
};

}  // namespace weft::rref
