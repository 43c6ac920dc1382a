// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/call/expired_calls.h>

namespace weft::call {

namespace {

// At most so many calls are remembered: a function may never answer.
constexpr std::size_t kMost = 4096;

}  // namespace

void ExpiredCalls::add(std::vector<PendingCalls::Taken> calls) {
  std::vector<WaitingCall> dropped;  // destroyed outside the lock: free bytes wake others
  MutexLock lock(mutex_);
  for (auto& [id, call] : calls) {
    if (call.connection_number != 0 && is_users(call.kind)) calls_.emplace(id, std::move(call));
  }
  while (calls_.size() > kMost) {
    const auto oldest = calls_.begin();
    ++dropped_[{oldest->second.to, oldest->second.connection_number}];
    dropped.push_back(std::move(oldest->second));
    calls_.erase(oldest);
  }
}

ExpiredCalls::Found ExpiredCalls::take(std::uint64_t id, int rank,
                                       std::uint64_t connection_number) {
  Found result;
  MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  const auto count = dropped_.find({rank, connection_number});
  if (found != calls_.end() && found->second.to == rank &&
      found->second.connection_number == connection_number) {
    result.call = std::move(found->second);
    calls_.erase(found);
  } else if (count != dropped_.end()) {  // counted, so that no peer can make up any number of them
    result.was_dropped = true;
    if (--count->second == 0) dropped_.erase(count);
  }
  return result;
}

std::vector<WaitingCall> ExpiredCalls::take_all_of(int rank, std::uint64_t connection_number) {
  std::vector<WaitingCall> taken;
  MutexLock lock(mutex_);
  for (auto it = calls_.begin(); it != calls_.end();) {
    if (it->second.to != rank || it->second.connection_number != connection_number) {
      ++it;
      continue;
    }
    taken.push_back(std::move(it->second));
    it = calls_.erase(it);
  }
  dropped_.erase({rank, connection_number});
  return taken;
}

std::map<std::uint64_t, WaitingCall> ExpiredCalls::take_all() {
  MutexLock lock(mutex_);
  return std::exchange(calls_, {});
}

}  // namespace weft::call
