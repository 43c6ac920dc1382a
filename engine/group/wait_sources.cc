// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/group/wait_sources.h>

namespace weft::group {

void WaitSources::add(const std::string& group, WaitSource source) {
  MutexLock lock(mutex_);
  sources_[group] = std::move(source);
}

void WaitSources::remove(const std::string& group) {
  WaitSource last;  // destroyed after the lock is released
  MutexLock lock(mutex_);
  const auto found = sources_.find(group);
  if (found == sources_.end()) return;
  last = std::move(found->second);
  sources_.erase(found);
}

std::optional<WaitSource> WaitSources::of(const std::string& group) const {
  MutexLock lock(mutex_);
  const auto found = sources_.find(group);
  return found == sources_.end() ? std::nullopt : std::optional(found->second);
}

std::map<std::string, WaitSource> WaitSources::all() const {
  MutexLock lock(mutex_);
  return sources_;
}

std::optional<std::pair<std::string, Wait>> WaitSources::oldest(const std::string& but) const {
  std::optional<std::pair<std::string, Wait>> oldest;
  const auto sources = all();
  for (const auto& [group, source] : sources) {
    if (group == but) continue;
    const auto pending = source.pending();
    if (pending.empty() || (oldest && oldest->second.since <= pending.front().since)) continue;
    oldest = {group, pending.front()};
  }
  return oldest;
}

void WaitSources::note_told(const std::string& group, std::uint64_t collective) {
  MutexLock lock(mutex_);
  const auto found = sources_.find(group);
  if (found != sources_.end()) found->second.told = collective;
}

}  // namespace weft::group
