// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

#include <weft/base/log.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/call/present_workers.h>

namespace weft::call {

bool PresentWorkers::add(const Member& worker) {
  MutexLock lock(mutex_);
  const auto [known, is_new] = workers_.try_emplace(worker.worker.rank, worker);
  if (is_new) return true;
  if (known->second.generation >= worker.generation) return false;
  known->second = worker;
  return true;
}

bool PresentWorkers::remove(int rank, Generation generation) {
  MutexLock lock(mutex_);
  const auto found = workers_.find(rank);
  if (found == workers_.end() || found->second.generation != generation) return false;
  workers_.erase(found);
  watched_.erase(rank);
  return true;
}

std::optional<Member> PresentWorkers::find(int rank) const {
  MutexLock lock(mutex_);
  const auto found = workers_.find(rank);
  return found == workers_.end() ? std::nullopt : std::optional(found->second);
}

bool PresentWorkers::has(const std::string& name) const {
  MutexLock lock(mutex_);
  return std::ranges::any_of(workers_,
                             [&](const auto& one) { return one.second.worker.name == name; });
}

std::vector<Member> PresentWorkers::replaced_by(const Member& worker) const {
  std::vector<Member> replaced;
  MutexLock lock(mutex_);
  for (const auto& [rank, one] : workers_) {
    const bool is_before = rank == worker.worker.rank && one.generation < worker.generation;
    if (is_before || (rank != worker.worker.rank && one.worker.name == worker.worker.name))
      replaced.push_back(one);
  }
  return replaced;
}

std::vector<int> PresentWorkers::new_neighbours(int self) {
  std::vector<int> fresh;
  MutexLock lock(mutex_);
  const auto watch = [&](const Member& one) WEFT_REQUIRES(mutex_) {
    const auto [known, is_new] = watched_.try_emplace(one.worker.rank, one.generation);
    if (is_new || std::exchange(known->second, one.generation) != one.generation)
      fresh.push_back(one.worker.rank);
  };
  const auto higher = workers_.upper_bound(self);
  if (higher != workers_.end()) watch(higher->second);
  if (higher != workers_.begin()) watch(std::prev(higher)->second);
  return fresh;
}

void News::on_lost(LostCallback callback) {
  MutexLock lock(mutex_);
  lost_.push_back(std::make_shared<const LostCallback>(std::move(callback)));
}

void News::on_joined(JoinedCallback callback) {
  MutexLock lock(mutex_);
  joined_.push_back(std::make_shared<const JoinedCallback>(std::move(callback)));
}

bool News::tells_of_losses() const {
  MutexLock lock(mutex_);
  return !lost_.empty();
}

bool News::add_lost(const WorkerInfo& worker, const Error& why) { return add({worker, why}); }
bool News::add_joined(const WorkerInfo& worker) { return add({worker, std::nullopt}); }

bool News::add(One one) {
  MutexLock lock(mutex_);
  if (one.lost ? lost_.empty() : joined_.empty()) return false;
  untold_.push_back(std::move(one));
  return !std::exchange(tells_, true);
}

std::optional<News::One> News::next() {
  MutexLock lock(mutex_);
  tells_ = !untold_.empty();
  if (!tells_) return std::nullopt;
  One one = std::move(untold_.front());
  untold_.pop_front();
  return one;
}

void News::tell(const std::string& self) {
  const auto guarded = [&](const char* which, const auto& call) {
    try {
      call();
    } catch (...) {
      log::warn(std::string(which) + " callback of " + self +
                " threw: " + text_of(std::current_exception()));
    }
  };
  while (const auto one = next()) {
    UniqueLock lock(mutex_);
    const auto lost = lost_;
    const auto joined = joined_;
    lock.unlock();
    if (one->lost) {
      for (const auto& callback : lost)
        guarded("an on_worker_lost", [&] { (*callback)(one->worker, *one->lost); });
    } else {
      for (const auto& callback : joined)
        guarded("an on_worker_joined", [&] { (*callback)(one->worker); });
    }
  }
}

void News::close() {
  std::vector<std::shared_ptr<const LostCallback>> lost;  // destroyed outside of the lock
  std::vector<std::shared_ptr<const JoinedCallback>> joined;
  MutexLock lock(mutex_);
  lost.swap(lost_);
  joined.swap(joined_);
  untold_.clear();
}

}  // namespace weft::call
