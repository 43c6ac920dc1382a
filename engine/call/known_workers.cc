// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/call/known_workers.h>

namespace weft::call {

void WorkerTable::add(int rank, WorkerEntry entry) {
  erase(rank);
  ranks_.insert_or_assign(entry.worker.name, rank);
  by_rank_.emplace(rank, std::move(entry));
}

void WorkerTable::erase(int rank) {
  const auto found = by_rank_.find(rank);
  if (found == by_rank_.end()) return;
  const auto named = ranks_.find(found->second.worker.name);
  if (named != ranks_.end() && named->second == rank) ranks_.erase(named);
  by_rank_.erase(found);
}

const WorkerEntry* WorkerTable::find(int rank) const {
  const auto found = by_rank_.find(rank);
  return found == by_rank_.end() ? nullptr : &found->second;
}

const WorkerEntry* WorkerTable::find(const std::string& name) const {
  const auto named = ranks_.find(name);
  return named == ranks_.end() ? nullptr : find(named->second);
}

const WorkerEntry* WorkerTable::find(const Recipient& worker) const {
  const auto* const found = find(worker.rank);
  return found != nullptr && worker.fits(found->generation) ? found : nullptr;
}

const WorkerEntry* WorkerTable::find(const WorkerInfo& worker) const {
  const auto* const found = find(worker.rank);
  return found != nullptr && (worker.name.empty() || found->worker.name == worker.name) ? found
                                                                                        : nullptr;
}

void KnownWorkers::replace(WorkerTable workers, std::map<int, WorkerRecord> ended) {
  MutexLock lock(mutex_);
  workers_ = std::move(workers);
  ended_ = std::move(ended);
}

void KnownWorkers::update(int rank, const WorkerRecord& record) {
  std::optional<WorkerEntry> entry;
  if (record.stands(Standing::Joined)) entry = entry_of(record);
  MutexLock lock(mutex_);
  const WorkerEntry* const known = workers_.find(rank);
  if (entry) {
    if (known == nullptr || known->generation <= entry->generation)
      workers_.add(rank, std::move(*entry));
  } else if (known != nullptr && known->generation <= record.generation) {
    workers_.erase(rank);
  }
}

void KnownWorkers::forget(int rank) {
  MutexLock lock(mutex_);
  if (const WorkerEntry* const known = workers_.find(rank); known != nullptr)
    forgotten_.insert_or_assign(rank, *known);
  workers_.erase(rank);
}

void KnownWorkers::forget_before(int rank, Generation generation) {
  MutexLock lock(mutex_);
  const WorkerEntry* const found = workers_.find(rank);
  if (found != nullptr && found->generation < generation) workers_.erase(rank);
  const auto forgotten = forgotten_.find(rank);
  if (forgotten != forgotten_.end() && forgotten->second.generation < generation)
    forgotten_.erase(forgotten);
}

std::optional<WorkerInfo> KnownWorkers::worker(int rank) const {
  return find(rank, [](const WorkerEntry& entry) { return entry.worker; });
}

std::optional<Generation> KnownWorkers::generation(int rank) const {
  return find(rank, [](const WorkerEntry& entry) { return entry.generation; });
}

std::vector<Member> KnownWorkers::members() const {
  std::vector<Member> all;
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : workers_.by_rank()) all.push_back(entry);
  return all;
}

std::vector<WorkerInfo> KnownWorkers::workers() const {
  std::vector<WorkerInfo> all;
  MutexLock lock(mutex_);
  for (const auto& [rank, entry] : workers_.by_rank()) all.push_back(entry.worker);
  return all;
}

WorkerTable KnownWorkers::table() const {
  MutexLock lock(mutex_);
  return workers_;
}

std::optional<WorkerEntry> KnownWorkers::forgotten(const Recipient& worker) const {
  MutexLock lock(mutex_);
  const auto known = forgotten_.find(worker.rank);
  if (known == forgotten_.end() || !worker.fits(known->second.generation)) return std::nullopt;
  return known->second;
}

std::optional<WorkerRecord> KnownWorkers::ended(int rank, const std::string& name) const {
  MutexLock lock(mutex_);
  for (const auto& [its_rank, record] : ended_) {
    if ((rank < 0 || its_rank == rank) && (name.empty() || record.name == name)) return record;
  }
  return std::nullopt;
}

}  // namespace weft::call
