// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/breakage.h>

namespace weft::trace {

namespace {

struct Broken {
  Member member;
  Breakage why;
};

constinit ForkMutex mutex(ForkOrder::Jobs);
// This is a ring. A forked process may keep its parent's entries: it is no member of those groups.
constinit std::array<Broken, kMostBreakages> latest WEFT_GUARDED_BY(mutex){};
constinit std::size_t recorded WEFT_GUARDED_BY(mutex) = 0;

}  // namespace

void record_breakage(const Member& member, const Error& why) noexcept {
  Broken broken{member, {.blame = why.blame()}};
  std::memcpy(broken.why.error.data(), why.text().data(),
              std::min(why.text().size(), kErrorBytes - 1));
  MutexLock lock(mutex);
  latest[recorded++ % kMostBreakages] = broken;
}

std::optional<Breakage> breakage_of(const Member& member) noexcept {
  MutexLock lock(mutex);
  const auto end = latest.begin() + static_cast<std::ptrdiff_t>(std::min(recorded, kMostBreakages));
  const auto found = std::find_if(latest.begin(), end, [&](const Broken& one) {
    return one.member.party() == member.party() && one.member.generation() == member.generation();
  });
  if (found == end) return std::nullopt;
  return found->why;
}

}  // namespace weft::trace
