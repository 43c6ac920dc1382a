// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/autograd/failed_passes.h>
#include <weft/engine/autograd/recording.h>

namespace weft::autograd {

void FailedPasses::add(PassId pass) {
  MutexLock lock(mutex_);
  std::set<int> others = recording_.workers();
  others.erase(self_);
  if (!others.empty()) untold_.insert_or_assign(pass, std::move(others));
  if (untold_.size() > kMostNamed) untold_.erase(untold_.begin());
}

void FailedPasses::told(PassId pass, int rank) {
  MutexLock lock(mutex_);
  const auto found = untold_.find(pass);
  if (found == untold_.end()) return;
  found->second.erase(rank);
  if (found->second.empty()) untold_.erase(found);
}

void FailedPasses::replace(PassId pass, int lost, const std::set<int>& others) {
  MutexLock lock(mutex_);
  const auto found = untold_.find(pass);
  if (found == untold_.end()) return;
  found->second.insert(others.begin(), others.end());
  found->second.erase(lost);
  if (found->second.empty()) untold_.erase(found);
}

void FailedPasses::remove_worker(int rank) {
  MutexLock lock(mutex_);
  for (auto& [pass, workers] : untold_) workers.erase(rank);
  std::erase_if(untold_, [](const auto& one) { return one.second.empty(); });
}

std::vector<PassId> FailedPasses::untold() const {
  std::vector<PassId> passes;
  MutexLock lock(mutex_);
  for (const auto& [pass, workers] : untold_) passes.push_back(pass);
  return passes;
}

}  // namespace weft::autograd
