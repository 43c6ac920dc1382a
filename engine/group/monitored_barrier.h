// SPDX-License-Identifier: Apache-2.0
// The barrier over the store that names the ranks which do not come.
//
// Rank 0 counts the rounds that it has closed, so a rank that missed one is not behind in the next.
// A rank comes to the open round by writing the number of its attempt, and stays in it unless its
// time is over first. An attempt can be claimed once: by rank 0, which counts the rank in, or by
// the rank itself, which withdraws. (The key stays after a withdrawal: rank 0 may have seen it and
// be about to get it.)
//
// The group's Core owns it. Thread-safe: threads of this rank take turns.
#pragma once

#include <chrono>
#include <set>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/trace/operation.h>

namespace weft::group {

class MonitoredBarrier {
 public:
  // All are the group's, and outlive this object.
  MonitoredBarrier(const CoreOptions& options, const trace::Member& member, StoreBootstrap& store,
                   const Ledger& ledger, Failure& failure);

  // Implements ProcessGroup::monitored_barrier(), for a group that is not known to be broken.
  // Blocks until all ranks have come, at most for `timeout`.
  void meet(std::chrono::milliseconds timeout);

 private:
  void lead(const std::string& base, std::chrono::milliseconds timeout) WEFT_REQUIRES(mutex_);
  std::set<int> count_in(const std::string& base, Deadline deadline) WEFT_REQUIRES(mutex_);
  // Erases the keys of the round before the last one. Returns the number of the next round.
  std::uint64_t next_round() WEFT_REQUIRES(mutex_);
  std::set<int> everybody_else() const;
  void await_readers(const std::string& base, const std::set<int>& absent) WEFT_REQUIRES(mutex_);
  void follow(const std::string& base, std::chrono::milliseconds timeout) WEFT_REQUIRES(mutex_);
  std::string verdict(const std::string& base, const std::string& attempt,
                      std::chrono::milliseconds timeout) WEFT_REQUIRES(mutex_);
  std::string came() const;

  const CoreOptions& options_;
  const trace::Member& member_;
  StoreBootstrap& store_;
  const Ledger& ledger_;
  Failure& failure_;
  Mutex mutex_;  // held through a barrier
  int attempts_ WEFT_GUARDED_BY(mutex_) = 0;
  // This rank's keys in the store: those of the round that passed last and of later ones, and those
  // of earlier rounds.
  std::vector<std::string> keys_ WEFT_GUARDED_BY(mutex_), stale_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::group
