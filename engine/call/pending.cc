// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/call/pending.h>

namespace weft::call {

void PendingCalls::add(std::uint64_t id, WaitingCall call) {
  MutexLock lock(mutex_);
  calls_.emplace(id, std::move(call));
}

void PendingCalls::note(std::uint64_t id, int rank, std::string why) {
  MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found != calls_.end() && found->second.to == rank) found->second.note = std::move(why);
}

template <class F>
WaitingCall PendingCalls::take_where(std::uint64_t id, F wanted) {
  MutexLock lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end() || !wanted(found->second)) return {};
  WaitingCall call = std::move(found->second);
  calls_.erase(found);
  return call;
}

WaitingCall PendingCalls::take(std::uint64_t id) {
  return take_where(id, [](const WaitingCall&) { return true; });
}

WaitingCall PendingCalls::take_of(std::uint64_t id, int rank, std::uint64_t connection_number) {
  return take_where(id, [&](const WaitingCall& call) {
    return call.to == rank && call.connection_number == connection_number;
  });
}

template <class F>
std::vector<PendingCalls::Taken> PendingCalls::take_if(F wanted) {
  std::vector<Taken> taken;
  MutexLock lock(mutex_);
  for (auto it = calls_.begin(); it != calls_.end();) {
    if (wanted(it->second)) {
      taken.push_back({it->first, std::move(it->second)});
      it = calls_.erase(it);
    } else {
      ++it;
    }
  }
  return taken;
}

std::vector<PendingCalls::Taken> PendingCalls::take_all_to(int rank,
                                                           std::uint64_t connection_number) {
  return take_if([&](const WaitingCall& call) {
    return call.to == rank &&
           (connection_number == 0 || call.connection_number == connection_number);
  });
}

std::vector<PendingCalls::Taken> PendingCalls::take_all() {
  return take_if([](const WaitingCall&) { return true; });
}

std::vector<PendingCalls::Taken> PendingCalls::take_expired(Deadline::Clock::time_point now,
                                                            Deadline& next) {
  next = Deadline::never();
  auto taken = take_if([&](const WaitingCall& call) {
    if (call.deadline.point() <= now) return true;
    next = Deadline::sooner(next, call.deadline);
    return false;
  });
  // In the order of their deadlines: a creation comes before the fetch that waits for it.
  std::sort(taken.begin(), taken.end(), [](const Taken& a, const Taken& b) {
    return std::pair(a.call.deadline.point(), a.id) < std::pair(b.call.deadline.point(), b.id);
  });
  return taken;
}

namespace {

AwaitedCall awaited(std::uint64_t id, const WaitingCall& call, Deadline::Clock::time_point since) {
  const bool is_fetch = call.kind == MessageKind::Fetch;
  const std::string what = call.function != nullptr ? call.function->name : "a call";
  return {id,      is_fetch ? "the value of an RRef" : what, call.to, call.limit, call.here, since,
          is_fetch};
}

}  // namespace

std::optional<AwaitedCall> PendingCalls::longest_awaited(
    const std::vector<EventLoop::Wait>& waiting) const {
  std::unordered_map<const void*, Deadline::Clock::time_point> waits;
  for (const auto& wait : waiting) {
    const auto [known, is_new] = waits.emplace(wait.awaited, wait.since);
    if (!is_new) known->second = std::min(known->second, wait.since);
  }
  std::optional<AwaitedCall> longest;
  std::optional<AwaitedCall> oldest;
  MutexLock lock(mutex_);
  for (const auto& [id, call] : calls_) {
    const bool is_programs = is_users(call.kind) || call.kind == MessageKind::Backward;
    const auto wait = call.pending ? waits.find(call.pending->awaited()) : waits.end();
    if (is_programs && wait != waits.end() && (!longest || wait->second < longest->since))
      longest = awaited(id, call, wait->second);
    // Ids count up, so the oldest call has the lowest.
    if (is_programs && (!oldest || id < oldest->id)) oldest = awaited(id, call, call.since);
    if (wait != waits.end()) waits.erase(wait);
  }
  if (longest || !oldest || waits.empty()) return longest;
  const auto first = std::min_element(
      waits.begin(), waits.end(),
      [](const auto& one, const auto& other) { return one.second < other.second; });
  oldest->since = std::max(oldest->since, first->second);
  oldest->is_its_own = false;
  return oldest;
}

bool PendingCalls::waits(std::uint64_t id) const {
  MutexLock lock(mutex_);
  return calls_.contains(id);
}

std::size_t PendingCalls::size() const {
  MutexLock lock(mutex_);
  return calls_.size();
}

}  // namespace weft::call
