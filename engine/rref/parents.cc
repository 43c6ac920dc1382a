// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <weft/engine/rref/parents.h>

namespace weft::rref {

void Parents::keep(ForkId child, std::shared_ptr<Handle> parent,
                   const call::WorkerGeneration& receiver) {
  MutexLock lock(mutex_);
  parents_.insert_or_assign(child, Parent{std::move(parent), receiver});
}

void Parents::child_accepted(ForkId child) {
  Parent ended;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto found = parents_.find(child);
  if (found == parents_.end()) return;
  ended = std::move(found->second);
  parents_.erase(found);
}

bool Parents::keeps_parent_of(ForkId child) const {
  MutexLock lock(mutex_);
  return parents_.contains(child);
}

bool Parents::await(int rank) const {
  MutexLock lock(mutex_);
  for (const auto& [child, parent] : parents_) {
    if (parent.receiver.rank == rank) return true;
  }
  return false;
}

std::size_t Parents::workers_lost(
    const std::function<bool(const call::WorkerGeneration&)>& is_lost) {
  std::vector<Parent> ended;  // destroyed after the lock
  MutexLock lock(mutex_);
  for (auto it = parents_.begin(); it != parents_.end();) {
    if (is_lost(it->second.receiver)) {
      ended.push_back(std::move(it->second));
      it = parents_.erase(it);
    } else {
      ++it;
    }
  }
  return ended.size();
}

void Parents::close() {
  std::unordered_map<ForkId, Parent> ended;  // destroyed after the lock
  MutexLock lock(mutex_);
  ended.swap(parents_);
}

}  // namespace weft::rref
