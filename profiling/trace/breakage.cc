// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <weft/profiling/trace/breakage.h>
#include <weft/profiling/trace/latest_members.h>

namespace weft::trace {

namespace {

constinit LatestMembers<Breakage, kMostBreakages> latest;

}  // namespace

void record_breakage(const Member& member, const Error& why) noexcept {
  Breakage broken{.blame = why.blame()};
  std::memcpy(broken.error.data(), why.text().data(), std::min(why.text().size(), kErrorBytes - 1));
  latest.set(member, broken);
}

std::optional<Breakage> breakage_of(const Member& member) noexcept { return latest.get(member); }

}  // namespace weft::trace
