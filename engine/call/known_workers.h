// SPDX-License-Identifier: Apache-2.0
// The workers of a job that an agent knows, as far as it has read the store: where each listens,
// and how those that are gone have ended. Owned by the agent's directory. Usable from every thread;
// nothing here reads the store or blocks.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/engine/call/records.h>
#include <weft/engine/call/types.h>

namespace weft::call {

// Workers by rank and by name. Not thread-safe.
class WorkerTable {
 public:
  void add(int rank, WorkerEntry entry);  // replaces the entry of that rank
  void erase(int rank);
  // These return null for a worker that the table does not have.
  const WorkerEntry* find(int rank) const;
  const WorkerEntry* find(const std::string& name) const;
  const WorkerEntry* find(const Recipient& worker) const;   // of its generation, if it gives one
  const WorkerEntry* find(const WorkerInfo& worker) const;  // of its name, if it gives one
  const std::map<int, WorkerEntry>& by_rank() const { return by_rank_; }

 private:
  std::map<int, WorkerEntry> by_rank_;
  // Index by name, because calls are made by name and jobs have many workers.
  std::unordered_map<std::string, int> ranks_;
};

class KnownWorkers {
 public:
  // Replaces all known workers. `ended` holds the records of ranks whose last worker has left or is
  // lost.
  void replace(WorkerTable workers, std::map<int, WorkerRecord> ended);
  // Updates the worker of that rank by its record, unless a later generation is known.
  void update(int rank, const WorkerRecord& record);
  // Forgets a worker that may have gone, except for its last address.
  void forget(int rank);
  // Forgets for good a worker of that rank and of an earlier generation: it has left or is lost.
  void forget_before(int rank, Generation generation);

  // Returns `read` of the entry of a worker that is wanted by name, rank or both; nothing if it is
  // not known. `read` is called under the lock.
  template <class Key, class Read>
  auto find(const Key& wanted, Read read) const
      -> std::optional<std::invoke_result_t<Read, const WorkerEntry&>> {
    MutexLock lock(mutex_);
    const WorkerEntry* const found = workers_.find(wanted);
    if (found == nullptr) return std::nullopt;
    return read(*found);
  }
  std::optional<WorkerInfo> worker(int rank) const;
  std::optional<Generation> generation(int rank) const;
  std::vector<Member> members() const;
  std::vector<WorkerInfo> workers() const;
  WorkerTable table() const;
  // The last known entry of a forgotten worker, used while the store fails.
  std::optional<WorkerEntry> forgotten(const Recipient& worker) const;
  // The record of a worker that has left or is lost, by its rank (-1: any), name (empty: any) or
  // both.
  std::optional<WorkerRecord> ended(int rank, const std::string& name) const;

 private:
  mutable Mutex mutex_;
  WorkerTable workers_ WEFT_GUARDED_BY(mutex_);
  std::map<int, WorkerRecord> ended_ WEFT_GUARDED_BY(mutex_);  // as of the last reading
  std::map<int, WorkerEntry> forgotten_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
