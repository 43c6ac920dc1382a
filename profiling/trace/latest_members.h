// SPDX-License-Identifier: Apache-2.0
// Keeps one value for each of the groups and agents of which something was recorded last. Dumps
// show them. Callable from any thread. Nothing here allocates, so that a dump can be written in a
// forked copy of a process that has crashed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/description.h>

namespace weft::trace {

// The latest kMost are kept. For static variables.
template <class T, std::size_t kMost>
class LatestMembers {
 public:
  // Replaces the member's value if there is one.
  void set(const Member& member, const T& value) noexcept {
    MutexLock lock(mutex_);
    if (Entry* known = find(member)) {
      known->value = value;
    } else {
      entries_[recorded_++ % kMost] = {member, value};
    }
  }
  std::optional<T> get(const Member& member) noexcept {
    MutexLock lock(mutex_);
    const Entry* known = find(member);
    return known == nullptr ? std::nullopt : std::optional<T>(known->value);
  }

 private:
  struct Entry {
    Member member;
    T value{};
  };
  Entry* find(const Member& member) WEFT_REQUIRES(mutex_) {
    const auto end = entries_.begin() + static_cast<std::ptrdiff_t>(std::min(recorded_, kMost));
    const auto found = std::find_if(entries_.begin(), end, [&](const Entry& one) {
      return one.member.party() == member.party() && one.member.generation() == member.generation();
    });
    return found == end ? nullptr : &*found;
  }

  ForkMutex mutex_{ForkOrder::Jobs};
  // This is a ring. A forked process may keep its parent's entries: it is no member of those
  // groups.
  std::array<Entry, kMost> entries_ WEFT_GUARDED_BY(mutex_){};
  std::size_t recorded_ WEFT_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::trace
